// Runs before the first paint, so that the other theme does not flash. A classic script, because modules wait.
(function () {
  var choice = null;
  try {
    choice = localStorage.getItem("geventstalk-theme");
  } catch {
    // Storage may be forbidden; then the system's choice holds.
  }
  if (choice === "light" || choice === "dark") document.documentElement.dataset.theme = choice;
})();
