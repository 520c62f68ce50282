/**
 * Graft's help pages in the panel that the editor shows them in: it is 220 to 280 pixels wide as it opens, and tables
 * would make it scroll sideways. Where there is room they stay as the editor draws them. Links between the pages, which the
 * editor would open in another window, lead to where they say.
 */
import { el } from './dom.js'
import { elementsOf } from './markdown.js'
import { t } from './texts.js'

const NARROW = '520px'
const DOCS = new URL('./docs/', import.meta.url) // /extensions/graft_nodes/docs/

/** Style the pages of this pack, once. */
export function fitPages() {
  const { pathname } = DOCS
  const page = `.node-help-content:has(img[src*="${pathname}"])`
  document.head.append(
    el(
      'style',
      {},
      `${page} { container-type: inline-size; overflow-wrap: anywhere }
       ${page} pre { white-space: pre-wrap }
       ${page} .graft-help > button { position: sticky; top: 0.5rem; float: right }
       @container (max-width: ${NARROW}) {
         ${page} table { table-layout: fixed; width: 100%; font-size: 0.75rem; hyphens: auto }
         ${page} :is(th, td) { padding: 0.25rem; overflow-wrap: anywhere; white-space: normal }
       }`,
    ),
  )
}

/** Follow the links of the pages of this pack. */
export function followLinks() {
  document.addEventListener('click', followed, true) // before the editor, which opens them in another window
}

function followed(event) {
  const link = event.target.closest?.('.node-help-content a[href]')
  const content = link?.closest('.node-help-content')
  if (!content?.querySelector(`img[src*="${DOCS.pathname}"]`)) return
  const address = link.getAttribute('href')
  const page = pageOf(address)
  if (!page && !address.startsWith('#')) return
  event.preventDefault()
  event.stopPropagation()
  if (page) show(content, page)
  else scrollTo(link.closest('.graft-help') ?? content, address.slice(1))
}

/**
 * The page of this pack that a link leads to, or undefined. Addresses are as the files have them, which lie one folder deeper
 * in other languages than English, or as front end 1.58 makes them of these, beginning with the pack's folder.
 */
function pageOf(address) {
  const pack = new URL('..', DOCS).pathname
  const place = address.startsWith(pack) ? address.slice(pack.length).replace(/^docs\//, '') : address
  const name = place.replace(/^\.\.\//, '')
  return /^\w+(\/[\w-]+)?\.md(#.*)?$/.test(name) ? new URL(name, DOCS) : undefined
}

/** Scroll to the heading that the end of an address names, as GitHub makes it of the heading's words. */
function scrollTo(content, anchor) {
  const name = decodeURIComponent(anchor)
  const headings = [...content.querySelectorAll('h1, h2, h3, h4, h5, h6')].filter((one) => one.offsetParent)
  headings.find((heading) => nameOf(heading) === name)?.scrollIntoView({ block: 'start' })
}

const nameOf = (heading) =>
  heading.textContent
    .trim()
    .toLowerCase()
    .replace(/[^\p{L}\p{N}_\- ]/gu, '')
    .replaceAll(' ', '-')

/** Show another page in the place of the one that the editor shows, until it shows another or a person goes back. */
async function show(content, page) {
  const response = await fetch(page)
  if (!response.ok) return
  const elements = elementsOf(await response.text(), DOCS)
  content.querySelector(':scope > .graft-help')?.remove()
  const own = content.firstElementChild
  const back = el('button', { class: 'graft-button', type: 'button', onclick: () => close() }, t('Back'))
  const shown = el('div', { class: `${own.className} graft-help` }, back, ...elements)
  const watcher = new MutationObserver(() => close())
  const close = () => {
    watcher.disconnect()
    shown.remove()
    own.style.display = ''
  }
  own.style.display = 'none'
  content.append(shown)
  watcher.observe(content, { childList: true, subtree: true }) // the editor shows another page
  if (page.hash) scrollTo(shown, page.hash.slice(1))
  else shown.scrollIntoView({ block: 'start' })
}
