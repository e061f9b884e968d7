// Prints the faults that axe-core finds, in both themes; 1 if one of them is serious or critical.
const { chromium } = require("playwright-core");

const pages = ["index.html", "learn/masks.html", "reference/api/masks.html"];

const text = ({ html, any }) => {
  const { fgColor, bgColor, contrastRatio } = any[0]?.data ?? {};
  return html.replace(/\s+/g, " ").slice(0, 120) + (fgColor ? ` ${fgColor} on ${bgColor}: ${contrastRatio}` : "");
};

(async () => {
  const browser = await chromium.launch({
    executablePath: process.env.CHROMIUM || "/usr/bin/chromium",
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
      "--disable-component-update", "--disable-sync"],
  });
  let serious = 0;
  for (const colorScheme of ["light", "dark"]) {
    const page = await (await browser.newContext({ colorScheme })).newPage();
    for (const path of pages) {
      await page.goto(`${process.argv[2]}/${path}`);
      await page.addScriptTag({ path: require.resolve("axe-core/axe.min.js") });
      const { violations } = await page.evaluate(() => axe.run());
      for (const { id, impact, help, nodes } of violations) {
        serious += ["serious", "critical"].includes(impact);
        console.log(`${colorScheme} ${path}: ${impact} ${id}: ${help} (${nodes.length}), e.g. ${nodes.slice(0, 3).map(text).join(" | ")}`);
      }
    }
  }
  await browser.close();
  console.log(`${serious} serious faults on ${pages.length} pages in two themes`);
  process.exit(serious ? 1 : 0);
})();
