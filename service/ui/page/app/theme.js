// Dark or light: as the system says, until the switch says otherwise. The choice is kept in localStorage.

const NAME = "rollout-theme";
const CHOICES = ["auto", "light", "dark"];
const LABELS = { auto: "Theme: auto", light: "Theme: light", dark: "Theme: dark" };

export function chosenTheme() {
  return document.documentElement.dataset.theme ?? "auto";
}

export function nextTheme() {
  const chosen = CHOICES[(CHOICES.indexOf(chosenTheme()) + 1) % CHOICES.length];
  if (chosen === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = chosen;
  try {
    localStorage.setItem(NAME, chosen);
  } catch {
    // It holds until the page is left.
  }
  return chosen;
}

export function bindTheme(button) {
  const label = () => (button.textContent = LABELS[chosenTheme()]);
  button.addEventListener("click", () => {
    nextTheme();
    label();
  });
  label();
}
