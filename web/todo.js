/**
 * The panel of ApplyToDo: tokens of each depth before and after. The grids are those of the model and latent that the node met when it
 * ran last (its `graft_todo` output, kept in the workflow as a property); what a changed factor makes of them is shown at once.
 */
import { el, short } from './dom.js'
import { addPanel, chain, fit } from './editor.js'

const PROPERTY = 'graft tokens'

/** Give an ApplyToDo node its panel. */
export function addTodoPanel(node) {
  const content = el('div', { class: 'graft-content' })
  addPanel(node, 'todo', content)
  const show = () => {
    const depths = node.properties?.[PROPERTY]?.depths
    content.replaceChildren(...(depths ? drawn(depths, factors(node)) : [el('div', { class: 'graft-dim' }, 'Tokens by depth are shown here once it has run.')]))
    requestAnimationFrame(() => node.graph && fit(node))
  }
  chain(node, 'onExecuted', (output) => {
    const found = output?.graft_todo?.[0]
    if (!found) return
    node.properties[PROPERTY] = { depths: found.depths }
    show()
  })
  chain(node, 'onConfigure', show)
  for (const widget of node.widgets ?? []) {
    if (['factor', 'max_depth', 'depth_factors'].includes(widget.name)) chain(widget, 'callback', () => requestAnimationFrame(show))
  }
  show()
}

/** The factor of each depth as the node's inputs give it; null while they are not numbers. */
function factors(node) {
  const value = (name) => node.widgets.find((widget) => widget.name === name)?.value
  const listed = String(value('depth_factors') ?? '').split(/[\s,]+/).filter(Boolean).map(Number)
  const found = listed.length ? listed : Array(Number(value('max_depth'))).fill(Number(value('factor')))
  return found.every((factor) => factor >= 1) ? found : null
}

function drawn(depths, given) {
  let [all, kept] = [0, 0]
  const body = depths.map((row) => {
    const factor = given?.[row.depth - 1] ?? 1
    const after = row.before?.map((side) => Math.max(1, Math.floor(side / factor)))
    const frames = row.frames ?? 1
    const [before, left] = [row.before, after].map((grid) => (grid ? frames * grid[0] * grid[1] : null))
    const blocks = row.patched + row.skipped
    if (before !== null) {
      all += blocks * before * before
      kept += blocks * before * left
    }
    return el('tr', {},
      el('td', {}, String(row.depth)),
      el('td', {}, given ? short(factor) : '–'),
      el('td', {}, before === null ? '–' : `${before} (${row.before.join('×')})`),
      el('td', {}, before === null ? '–' : `${left} (${after.join('×')})`),
      el('td', {}, row.skipped && row.patched ? `${row.patched}, ${row.skipped} left alone` : String(blocks)))
  })
  const heads = ['depth', 'factor', 'tokens', 'keys and values', 'blocks']
  const table = el('table', { class: 'graft-table', 'aria-label': 'Tokens by depth' },
    el('thead', {}, el('tr', {}, ...heads.map((head) => el('th', { scope: 'col' }, head)))), el('tbody', {}, ...body))
  return all ? [table, el('div', { class: 'graft-dim' }, `about ${Math.round(100 * (1 - kept / all))}% of the self-attention products saved`)] : [table]
}
