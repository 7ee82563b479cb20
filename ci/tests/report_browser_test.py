"""The page of `verify --report` in Chromium: what people see, and that keys, narrow windows and 10,000 cases do it no harm.

It needs Debian's chromium, chromium-driver and python3-selenium, and is skipped where these are missing.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

COMMAND = os.path.join(os.environ["SHARDPROOF_BUILD"], "shardproof")
# The environment of the tests is made by Debian's Python, so Debian's packages for it fit.
sys.path.append("/usr/lib/python3/dist-packages")
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
try:
    import selenium.webdriver as webdriver
    from selenium.webdriver.chrome.service import Service
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys
except ImportError:
    webdriver = None

EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'> \"quoted\""
CASES = 10_000


def case_text(i):
    model = ("mlp(widths=5-3)", "gpt(layers=1,heads=1)", "odd(width=1)")[i % 3]
    strategy, mode = (("zero2", "fast"), ("zero3", "exact"))[i % 2]
    return f"{model} mesh(dp_shard={1 + i % 8}) {strategy} sgd(lr=0.1) {mode} seed={i} : step"


def lines():
    """Those of a run of 10,000 cases, of which one failed and none was ever drawn with both tp and cp."""
    for i in range(CASES):
        line = {"type": "case", "case": case_text(i), "held": i != 4321, "seconds": i / 1e5, "cases": i + 1}
        if i % 2 == 0:
            line.update(ratio=0.01 * 1.001 ** (i % 5000), precision="float32")
        yield line
    holds = {"layout": "flat[dp_shard]", "ranks": [[[0, 3]], [[3, 6]]]}
    tensor = {"name": EVIL, "shape": [2, 3], "parameter": holds,
              "state": {"layout": "replicated", "ranks": [[[0, 6]], [[0, 6]]]}}
    calls = [[{"column": i, "op": op, "group": "dp_shard", "call": f"{op}(float32 x 6)", "bytes": 24, "differs": i == 1}
              for i, op in enumerate(ops)] for ops in (("all_gather", "reduce_scatter"), ("all_gather", "all_reduce"))]
    yield {"type": "failure", "case": case_text(4321), "what": "gradient of " + EVIL, "where": "step 0: " + EVIL, "guess": "",
           "original": case_text(4321), "cases": 4322,
           "picture": {"step": 0, "axes": [["dp_shard", 2]], "tensors": [tensor], "tensors_left_out": 0, "calls": calls,
                       "calls_left_out": 0}}
    # Pairs of values, each with its cases.
    facets = [{"name": name, "values": [name, "no " + name]} for name in ("tp", "cp", "sp")]
    drawn = [["tp", "no cp", 9], ["no tp", "cp", 90], ["no tp", "no cp", 9000]]
    drawn += [[first, second, 4] for first in ("tp", "no tp", "cp", "no cp") for second in ("sp", "no sp")]
    yield {"type": "summary", "drawn_from": "seed 1", "asked": f"{CASES} cases", "part": 1, "parts": 1, "cases": CASES,
           "failures": 1, "seconds": 300.0, "interrupted": False,
           "covered": {"tp": 9, "rare": 0}, "pairs": {"facets": facets, "drawn": drawn}, "oracle_compared": 0,
           "oracle_differences": 0, "values_compared": 123456, "ratio_max": 2.0,
           "smallest_found": {"gradient in float32": [1e-6, 3e-6]}}


def faults():
    for i in range(60):
        yield {"type": "fault", "id": f"BUG-{i:02}", "title": EVIL if i == 0 else f"Bug {i}", "from": "somewhere",
               "check": "verify", "verdict": "survived" if i == 7 else "killed", "by": "gradient", "cases": i + 1,
               "case": "", "guess": "", "seconds": 1.0}


# The texts that are shown with a contrast below 4.5, as WCAG 2 defines it.
HARD_TO_READ = r"""
  const numbers = (text) => text.match(/[\d.]+/g).map(Number);
  const linear = (v) => v / 255 <= .04 ? v / 255 / 12.92 : ((v / 255 + .055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => .2126 * linear(r) + .7152 * linear(g) + .0722 * linear(b);
  function back(element) {
    for (; element; element = element.parentElement) {
      const colour = numbers(getComputedStyle(element).backgroundColor);
      if (colour.length < 4 || colour[3] > .9) return colour;
    }
    return [255, 255, 255];
  }
  const texts = 'h1, h2, h3, h4, p, dt, dd, td, th, a, code, .tag, small, button:enabled, figcaption, footer';
  return [...document.querySelectorAll(texts)].filter((e) => e.textContent.trim() && e.getClientRects().length)
      .filter((e) => {
        const [dark, bright] = [light(numbers(getComputedStyle(e).color)), light(back(e))].sort((a, b) => a - b);
        return (bright + .05) / (dark + .05) < 4.5;
      }).map((e) => e.outerHTML.slice(0, 80));"""


@unittest.skipUnless(webdriver and CHROMIUM and DRIVER,
                     "no browser: apt-get install chromium chromium-driver python3-selenium")
class ReportInABrowser(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.page = os.path.join(folder.name, "report.html")
        run, bugs = os.path.join(folder.name, "run.json"), os.path.join(folder.name, "faults.json")
        for path, objects in ((run, lines()), (bugs, faults())):
            with open(path, "w", encoding="utf-8") as file:
                file.writelines(json.dumps(line) + "\n" for line in objects)
        done = subprocess.run([COMMAND, "verify", "--merge", run, "--report", cls.page, "--faults", bugs],
                              capture_output=True, text=True)
        assert done.returncode == 1, done.stdout + done.stderr  # a case failed
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder.name}/profile"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        cls.browser = webdriver.Chrome(service=Service(DRIVER), options=options)
        cls.addClassCleanup(cls.browser.quit)

    def open(self, width=1400, dark=False):
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                                     {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        self.browser.get("file://" + self.page)

    def script(self, text, *arguments):
        return self.browser.execute_script(text, *arguments)

    def find(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def status(self, part):
        return self.find(f"#{part} .controls > span").text

    def test_it_says_the_verdict_and_has_all_parts(self):
        self.open()
        self.assertIn("Failed", self.find("h1").text)
        self.assertIn("1 case of 10,000 differed", self.find("#verdict").text)
        self.assertEqual([link.text for link in self.browser.find_elements(By.CSS_SELECTOR, "nav a")],
                         ["Failures", "Cases", "What was covered", "Errors and the tolerance", "Planted bugs"])
        self.assertIn(f"build/shardproof replay '{case_text(4321)}'", self.find("#failures").text)
        self.assertEqual(len(self.browser.find_elements(By.CSS_SELECTOR, "#failures .rank")), 2)
        self.assertEqual(len(self.browser.find_elements(By.CSS_SELECTOR, "#failures rect.apart")), 2)
        self.assertIn("tp with cp", self.find("#coverage").text)
        self.assertEqual(len(self.browser.find_elements(By.CSS_SELECTOR, "#coverage td.never")), 1)
        self.assertIn("59 of 60 planted bugs were found", self.find("#faults").text)

    def test_texts_of_others_stay_texts_and_nothing_is_loaded(self):
        self.open()
        self.assertIsNone(self.script("return window.pwned"))
        self.assertIn(EVIL, self.find("#failures h3").text)
        self.assertIn(EVIL, self.find("#faults tbody").text)
        self.assertEqual(self.script("return document.querySelectorAll('img, #failures b').length"), 0)
        self.assertEqual(self.script("return performance.getEntriesByType('resource').length"), 0)
        self.assertEqual(self.browser.get_log("browser"), [])

    def test_ten_thousand_cases_answer_at_once(self):
        self.open()
        self.assertEqual(self.status("cases"), "1 to 25 of 10,000 cases")
        self.assertLess(self.script("return document.querySelectorAll('*').length"), 4000)
        milliseconds = self.script("""
            const search = document.querySelector('#cases input'), start = performance.now();
            for (const text of ['z', 'ze', 'zero3', 'zero3 seed=99', '', 'seed=4321']) {
              search.value = text;
              search.dispatchEvent(new Event('input'));
              document.body.offsetHeight;
            }
            return (performance.now() - start) / 6;""")
        self.assertLess(milliseconds, 250)
        self.assertEqual(self.status("cases"), "1 to 1 of 1 case")

    def test_filters_sorting_and_pages_work_together(self):
        self.open()
        self.find("#cases .controls button:nth-of-type(2)").click()
        self.assertEqual(self.status("cases"), "26 to 50 of 10,000 cases")
        verdict = self.find("#cases select")
        verdict.send_keys("failed")
        self.assertEqual(self.status("cases"), "1 to 1 of 1 case")
        verdict.send_keys(Keys.HOME)
        self.assertEqual(self.status("cases"), "1 to 25 of 10,000 cases")
        header = self.find("#cases th:last-child")
        header.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
        self.assertEqual(header.get_attribute("aria-sort"), "ascending")
        header.find_element(By.TAG_NAME, "button").send_keys(Keys.ENTER)
        self.assertTrue(self.find("#cases tbody td").text.endswith("10,000"), "the slowest is the last")

    def test_keys_reach_what_the_mouse_reaches(self):
        self.open()
        body = self.find("body")
        body.send_keys(Keys.TAB)
        self.assertEqual(self.script("return document.activeElement.textContent"), "Skip to the content")
        row = self.find("#cases tbody button")
        row.send_keys(Keys.SPACE)
        self.assertEqual(row.get_attribute("aria-expanded"), "true")
        self.assertIn(case_text(0), self.find("#cases tr.detail").text)
        cell = self.find("#coverage td[tabindex='0']")
        cell.send_keys(Keys.ARROW_RIGHT)
        self.assertEqual(self.script("return document.activeElement.title"), "tp with no cp: 9 cases")
        self.assertIn("tp with no cp: 9 cases", self.find("#coverage").text)
        choice = self.browser.find_elements(By.CSS_SELECTOR, "#failures input[type=radio]")[2]
        choice.send_keys(Keys.SPACE)
        title = self.script("return document.querySelectorAll('.rank title')[1].textContent")
        self.assertIn("replicated: rank 1 holds 6 of 6", title)

    def test_it_fits_narrow_and_wide_windows_and_can_be_read_in_light_and_dark(self):
        backs = set()
        for dark in (False, True):
            for width in (360, 400, 1400):
                self.open(width, dark)
                self.assertLessEqual(self.script("return document.documentElement.scrollWidth"), width)
                self.assertEqual(self.script(HARD_TO_READ), [], "contrast below 4.5")
            backs.add(self.script("return getComputedStyle(document.body).backgroundColor"))
        self.assertEqual(len(backs), 2)


if __name__ == "__main__":
    unittest.main()
