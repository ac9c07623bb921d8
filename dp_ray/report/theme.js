// Sets the theme before the page is drawn: what the reader chose, else what the system says.
(() => {
  let chosen = null;
  try { chosen = localStorage.getItem("dp-ray-theme"); } catch { /* no storage for this page */ }
  const isDark = matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = chosen || (isDark ? "dark" : "light");
})();
