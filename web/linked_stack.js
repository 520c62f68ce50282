/** The rows of the LoRA Stack nodes that are linked to a node: found in the graph, and changed as one step of undo. */
import { changing } from './editor.js'
import { source } from './latent_size.js'
import { parse, plain, write } from './rows.js'
import { t } from './texts.js'

const MOST = 100 // nodes on the way, against a graph that leads round in circles

/**
 * Change the rows that a run has measured. `files` are the names of the rows that were in use, in the order of the stack;
 * `changes` has {field: value} for each of them. Returns what to say: {text, wrong}.
 */
export function changeRows(node, files, changes) {
  const stacks = stacksInto(node)
  if (!stacks) {
    const text = t('The stack does not come from LoRA Stack. Use the output LORA_STACK instead.')
    return { text, wrong: true }
  }
  const lists = stacks.map((stack) => ({ widget: widgetOf(stack), rows: parse(String(widgetOf(stack).value ?? '')) }))
  const used = lists.flatMap(({ rows }) => rows.filter((row) => row.on && row.model !== 0))
  if (JSON.stringify(used.map((row) => plain(row.file))) !== JSON.stringify(files.map(plain))) {
    return { text: t('The rows have changed since this was measured. Run the node again.'), wrong: true }
  }
  const others = used.filter((row, index) =>
    Object.entries(changes[index]).some(([field, value]) => row[field] !== value),
  )
  if (!others.length) return { text: t('The rows already have these block weights.'), wrong: false }
  used.forEach((row, index) => Object.assign(row, changes[index]))
  changing(() => {
    for (const { widget, rows } of lists) {
      const text = write(rows)
      if (widget.value === text) continue
      widget.value = text
      widget.callback?.(text)
    }
  })
  const text = t('Block weights are written into {count} rows. Ctrl+Z takes them back.', { count: others.length })
  return { text, wrong: false }
}

const widgetOf = (stack) => stack.widgets.find((widget) => widget.name === 'rows')

/** The LoRA Stack nodes that a node's stack comes from, the first rows first; null if another node has a part in it. */
function stacksInto(node) {
  const stacks = []
  let from = source(node, 'lora_stack')
  for (let seen = 0; from && seen < MOST; seen++) {
    const { type } = from.node
    if (type !== 'Reroute' && type !== 'GraftLoRAStack') return null
    if (type === 'GraftLoRAStack') stacks.unshift(from.node)
    from = source(from.node, type === 'Reroute' ? '' : 'lora_stack')
  }
  return stacks.length ? stacks : null
}
