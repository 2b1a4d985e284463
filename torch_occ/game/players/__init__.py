"""Players of `simulate`: each plays a segment of episodes for all seeds.

torch_player  any learner, in torch, one episode of every seed at a time
choice        which learners have a compiled player
engine        what compiled players share; the player of a fixed policy
ftrl          the compiled player of FTRL
adaptive      the compiled player of FTRL with hints and adaptive rates
corrected     the compiled player of FTRL on corrected empirical means
unknown       the compiled player of FTRL for unknown transitions
baselines     the compiled player of learners that plan with averages
uob_reps      the compiled player of UOB-REPS
indices       the compiled players of KL-UCB and Thompson sampling
planning      the compiled players of learners that plan with estimated transitions
"""
