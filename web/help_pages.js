/**
 * Graft's help pages in the panel that the editor shows them in: it is 220 to 280 pixels wide as it opens, and tables
 * would make it scroll sideways. Where there is room they stay as the editor draws them.
 */
import { el } from './dom.js'

const NARROW = '520px'

/** Style the pages of this pack, once. */
export function fitPages() {
  const { pathname } = new URL('./docs/', import.meta.url) // /extensions/graft_nodes/docs/
  const page = `.node-help-content:has(img[src*="${pathname}"])`
  document.head.append(
    el(
      'style',
      {},
      `${page} { container-type: inline-size; overflow-wrap: anywhere }
       ${page} pre { white-space: pre-wrap }
       @container (max-width: ${NARROW}) {
         ${page} table { table-layout: fixed; width: 100%; font-size: 0.75rem; hyphens: auto }
         ${page} :is(th, td) { padding: 0.25rem; overflow-wrap: anywhere; white-space: normal }
       }`,
    ),
  )
}
