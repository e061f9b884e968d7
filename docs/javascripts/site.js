// The theme puts wide tables into scrolling boxes. A focus lets the keyboard scroll them too.
addEventListener("load", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) box.tabIndex = 0;
});
