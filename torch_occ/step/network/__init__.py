"""The step inside a network of torch.

operator      the step as an operator, for torch.compile and torch.export
surroundings  other number types, autocast and inference mode around a step
"""
