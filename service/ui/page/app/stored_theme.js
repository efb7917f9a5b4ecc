// Runs before the first paint, so that a page in the chosen theme never flashes in the other one. See theme.js.
try {
  const stored = localStorage.getItem("rollout-theme");
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
} catch {
  // A browser that stores nothing follows the system.
}
