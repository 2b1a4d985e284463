// Typeset the formulas: arithmatex leaves each as \(...\) or \[...\] in an element of its class.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const source = element.textContent.trim();
    katex.render(source.slice(2, -2), element, {
      displayMode: source.startsWith("\\["),
      throwOnError: false, // a formula with a mistake is shown in red
    });
  }
});
