"""Draws icon.png and banner.png, which ComfyUI's registry shows, with Chromium: python docs/draw_banner.py"""

import base64
from pathlib import Path

from graft_nodes.tests.editor.browsing import browser_path
from playwright.sync_api import sync_playwright

HERE = Path(__file__).resolve().parent
ICON = (HERE.parent / "icon.svg").read_text(encoding="utf-8")
PICTURE = base64.b64encode((HERE / "before_after.png").read_bytes()).decode()
BANNER = f"""<style>
body {{ margin: 0; width: 1260px; height: 540px; background: #0e1c13; color: #e9f3ea; font-family: sans-serif }}
div {{ position: absolute; left: 64px; top: 120px; width: 600px }}
h1 {{ display: flex; align-items: center; gap: 28px; font-size: 92px; margin: 0 }}
span {{ zoom: 0.32 }}
p {{ font-size: 36px; line-height: 1.4; margin: 30px 0 0 }}
img {{ position: absolute; right: 48px; top: 60px; height: 420px; border-radius: 12px }}
</style>
<div><h1><span>{ICON}</span>Graft</h1><p>Patch, average and train<br>diffusion models<br>in ComfyUI's graph</p></div>
<img src="data:image/png;base64,{PICTURE}">
"""


def main() -> None:
    """Draw both."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for name, html, width, height in (
            ("icon.png", f"<body style='margin:0'>{ICON}", 400, 400),
            ("banner.png", BANNER, 1260, 540),
        ):
            page = browser.new_page(viewport={"width": width, "height": height})
            page.set_content(html)
            page.screenshot(path=HERE / name, omit_background=True)
        browser.close()


if __name__ == "__main__":
    main()
