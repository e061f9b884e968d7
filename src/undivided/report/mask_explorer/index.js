// The mask explorer: masks of undivided.masks as ranges of keys per row, computed and drawn in the browser.
//
// Scripts without dependencies, which a page loads in the order below. `undividedMasks` has the functions; `internal` is
// what the scripts share. In Node.js, `require` of this folder returns the same functions. The tests compare every
// constructor with undivided.masks.
"use strict";

for (const name of ["grammar", "masks", "sizes", "ranges", "readings", "explorer"]) require(`./${name}.js`);

module.exports = globalThis.undividedMasks;
