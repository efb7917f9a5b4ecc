// Tells a screen reader what has changed. What is said last wins: nobody listens to a queue of old news.

let pending = 0;

export function announce(text) {
  clearTimeout(pending);
  pending = setTimeout(() => {
    document.getElementById("announced").textContent = text;
  }, 150);
}
