"use strict";
(() => {
  const root = document.documentElement;
  const key = "gradsieve-theme";

  // a page opened from a file may be refused its storage
  const recall = () => { try { return localStorage.getItem(key); } catch { return null; } };
  const remember = (theme) => { try { localStorage.setItem(key, theme); } catch { /* for this visit only */ } };

  const theme = recall();
  if (theme === "light" || theme === "dark") root.dataset.theme = theme;

  const switchTheme = () => {
    const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = (root.dataset.theme || system) === "dark" ? "light" : "dark";
    remember(root.dataset.theme);
  };

  const hidden = new Set();
  const series = () => [...new Set([...document.querySelectorAll("[data-toggle]")].map((entry) => entry.dataset.toggle))];

  const show = () => {
    for (const mark of document.querySelectorAll("[data-series]")) mark.classList.toggle("off", hidden.has(mark.dataset.series));
    for (const entry of document.querySelectorAll("[data-toggle]")) entry.setAttribute("aria-pressed", String(!hidden.has(entry.dataset.toggle)));
    for (const all of document.querySelectorAll("[data-all]")) all.hidden = hidden.size === 0;
  };

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (!button) return;
    if ("themeToggle" in button.dataset) switchTheme();
    if ("all" in button.dataset) hidden.clear();
    const one = button.dataset.toggle;
    if (one !== undefined && !hidden.delete(one)) hidden.add(one);
    show();
  });

  document.addEventListener("dblclick", (event) => {
    const entry = event.target.closest("[data-toggle]");
    if (!entry) return;
    hidden.clear();
    for (const other of series()) if (other !== entry.dataset.toggle) hidden.add(other);
    show();
  });
})();
