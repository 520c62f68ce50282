/** A chart that fills its element and says what is under the pointer. */
import { draw } from './chart.js'
import { el, whenRecolored } from './dom.js'
import { whenSized } from './editor.js'

/** `describe(step)` gives the lines [color, text] that are said of a step; `changed()` is called when its size or the theme changes. */
export class Plot {
  constructor(label, describe, changed) {
    this.describe = describe
    this.canvas = el('canvas', { class: 'graft-chart', role: 'img', 'aria-label': label })
    this.cursor = el('div', { class: 'graft-cursor', hidden: true })
    this.tip = el('div', { class: 'graft-tip', hidden: true })
    this.element = el('div', { class: 'graft-plot' }, this.canvas, this.cursor, this.tip)
    this.canvas.addEventListener('pointermove', (event) => this.point(event.offsetX))
    this.canvas.addEventListener('pointerleave', () => this.point(null))
    whenSized(this.element, changed)
    whenRecolored(this.canvas, changed)
  }

  /** Draw at the element's size, with the arguments of `draw`. */
  draw(curves, format, options) {
    const { clientWidth, clientHeight } = this.element
    this.range = clientWidth ? draw(this.canvas, clientWidth, clientHeight, curves, format, options) : null
    this.point(this.pointed)
    return this.range
  }

  /** Say what is at a place across the canvas; null: nothing. */
  point(x) {
    this.pointed = x
    const { range } = this
    const isOut = !range || x === null || x === undefined || x < range.left - 4 || x > range.left + range.width + 4
    this.cursor.hidden = this.tip.hidden = isOut
    if (isOut) return
    const share = Math.min(1, Math.max(0, (x - range.left) / (range.width - 1)))
    const step = Math.round(range.from + share * (range.until - range.from))
    const across = range.until > range.from ? (step - range.from) / (range.until - range.from) : 0
    const at = range.left + across * (range.width - 1)
    this.cursor.style.left = `${at}px`
    const isLeft = share < 0.5
    this.tip.style.left = isLeft ? `${at + 8}px` : 'auto'
    this.tip.style.right = isLeft ? 'auto' : `${this.element.clientWidth - at + 8}px`
    this.tip.replaceChildren(
      ...this.describe(step).map(([color, text]) =>
        el('div', {}, color ? el('span', { style: `--curve: ${color}` }, text) : text),
      ),
    )
  }
}
