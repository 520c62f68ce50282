/** Where a node's own panel says what is wrong at the node; problems.js fills it. */
import { el } from './dom.js'

const boxes = new WeakMap()

/** A node's box, made once; empty and hidden at first. */
export function problemBox(node) {
  if (!boxes.has(node)) boxes.set(node, el('div', { class: 'graft-problem', role: 'alert', hidden: true }))
  return boxes.get(node)
}

/** A node's box if its panel has one. */
export const boxOf = (node) => boxes.get(node)

/** Forget a node's box: its panel is gone. */
export const forgetBox = (node) => boxes.delete(node)
