/** Line charts on a canvas element: any number of points, drawn as the extremes of each pixel column. */

const MARGIN = { left: 44, right: 10, top: 8, bottom: 18 }

const BLOCK = 64 // points of a Series that are summed up as one when many share a pixel

/** Points of a curve that grow at the end: steps ascend, values may be missing (NaN). */
export class Series {
  constructor() {
    this.clear()
  }

  /** Add a point; a step that was there already, or later ones, give way: a run went back. */
  add(step, value) {
    while (this.steps.length && this.last.step >= step) this.drop()
    this.steps.push(step)
    this.values.push(value)
    if (this.steps.length % BLOCK === 0) this.blocks.push(summary(this, this.steps.length - BLOCK, this.steps.length))
  }

  drop() {
    this.steps.pop()
    this.values.pop()
    this.blocks.length = Math.floor(this.steps.length / BLOCK)
  }

  clear() {
    this.steps = []
    this.values = []
    this.blocks = []
  }

  get last() {
    const index = this.steps.length - 1
    return { step: this.steps[index], value: this.values[index] }
  }

  /** The last point at a step or before it; undefined values where there is none. */
  until(step) {
    let [low, high] = [0, this.steps.length]
    while (low < high) {
      const middle = (low + high) >> 1
      if (this.steps[middle] <= step) low = middle + 1
      else high = middle
    }
    return { step: this.steps[low - 1], value: this.values[low - 1] }
  }
}

/** Exponential moving average without the bias of its start, as a Series of the same steps. */
export class Smoothed extends Series {
  constructor(weight) {
    super()
    this.weight = weight
  }

  add(step, value) {
    while (this.steps.length && this.last.step >= step) this.drop()
    let [sum, mass] = this.sums[this.sums.length - 1] ?? [0, 0]
    if (Number.isFinite(value)) {
      sum = sum * this.weight + value * (1 - this.weight)
      mass = mass * this.weight + 1 - this.weight
    }
    this.sums.push([sum, mass])
    super.add(step, mass ? sum / mass : NaN)
  }

  drop() {
    super.drop()
    this.sums.length = this.steps.length
  }

  clear() {
    super.clear()
    this.sums = []
  }
}

/** [step, lowest, highest, first, last] of the points from `start` to `end`, or null when none is a number. */
function summary({ steps, values }, start, end) {
  let found = null
  for (let index = start; index < end; index++) {
    const value = values[index]
    if (!Number.isFinite(value)) continue
    if (!found) found = [steps[index], value, value, value, value]
    else {
      if (value < found[1]) found[1] = value
      if (value > found[2]) found[2] = value
      found[4] = value
    }
  }
  return found
}

/** Thins out a series: at most `columns` entries [x in pixels, lowest, highest, first, last value], x ascending. */
export function decimated(series, from, until, columns) {
  const out = []
  const scale = until > from ? (columns - 1) / (until - from) : 0
  const put = (point) => {
    if (!point) return
    const at = Math.round((point[0] - from) * scale)
    const entry = out[out.length - 1]
    if (entry?.[0] !== at) out.push([at, point[1], point[2], point[3], point[4]])
    else {
      if (point[1] < entry[1]) entry[1] = point[1]
      if (point[2] > entry[2]) entry[2] = point[2]
      entry[4] = point[4]
    }
  }
  const blocks = series.steps.length > 2 * BLOCK * columns ? series.blocks : []
  for (const block of blocks) put(block)
  for (let index = blocks.length * BLOCK; index < series.steps.length; index++) put(summary(series, index, index + 1))
  return out
}

/**
 * About `count` rounded axis values between low and high, and three if there are so many multiples of `least`; none when
 * these are too close together to tell apart.
 */
export function ticks(low, high, count = 4, least = 0) {
  const raw = (high - low || Math.abs(high) || 1) / count
  const power = 10 ** Math.floor(Math.log10(raw))
  const sizes = [10, 5, 2, 1, 0.5, 0.2].map((factor) => factor * power).filter((size) => size >= least)
  const wide = sizes.filter((size) => size >= raw * 0.999).length - 1
  const found = sizes.slice(Math.max(0, wide)).map((size) => multiples(low, high, size, 10 * count))
  return found.find((values) => values.length >= 3) ?? found.at(-1) ?? []
}

/** The multiples of a size between low and high; none where there are more than `most`, or no numbers. */
function multiples(low, high, size, most) {
  const [first, last] = [Math.ceil(low / size - 1e-9), Math.floor(high / size + 1e-9)]
  if (!(last - first <= most)) return []
  const values = Array.from({ length: Math.max(0, last - first + 1) }, (_, index) =>
    Number(((first + index) * size).toPrecision(12)),
  )
  return [...new Set(values)]
}

const PLAIN = { of: (value) => value, ticks }
const LOG = { of: (value) => (value > 0 ? Math.log10(value) : -Infinity), ticks: logTicks }

/**
 * Draw curves [{series, color, width, dots, within}] into a canvas element of the given CSS size. Colors are CSS colors;
 * text takes the canvas's own CSS color. Options:
 *
 * - `robust`: a few values that would flatten all others are drawn at the edge, with a mark. A curve with `within`, a
 *   series, keeps to that one's range: one spike is in a smoothed curve for long.
 * - `log`: a logarithmic axis; what is not above zero is drawn at its lower edge.
 * - `right`: {series, color, width, format}, a curve with an axis of its own on the right, from zero.
 *
 * Returns {from, until, low, high, left, width, clipped}, or null when there is nothing to draw: the range of steps and
 * of values (as logarithms where `log`), where the plot lies across, and whether values lie beyond its edge.
 */
export function draw(canvas, width, height, curves, format, { robust, log, right } = {}) {
  if (!canvas.isConnected) return null // it has no colors yet
  const pen = cleared(canvas, width, height)
  const shown = curves.filter((curve) => curve.series.steps.length)
  const all = right?.series.steps.length ? [...shown, right] : shown
  const box = boxOf(width, height, all !== shown)
  if (!all.length || Math.min(box.width, box.height) < 20) return null
  const from = Math.min(...all.map((curve) => curve.series.steps[0]))
  const until = Math.max(...all.map((curve) => curve.series.last.step))
  const thinned = (series) => decimated(series, from, until, Math.floor(box.width))
  const drawn = shown.map((curve) => ({ ...curve, points: thinned(curve.series) }))
  const scale = log ? LOG : PLAIN
  const [low, high] = range(drawn, scale, robust, thinned)
  const style = getComputedStyle(canvas)
  if (low > high && all === shown) return null
  drawStepAxis(pen, style, box, from, until)
  const clipped = low <= high && drawCurves(pen, style, box, drawn, scale, [low, high], format)
  if (all !== shown) drawRight(pen, style, box, { ...right, points: thinned(right.series) })
  return { from, until, low, high, left: box.left, width: box.width, clipped }
}

/** Where the plot lies in a canvas, with room for the axes. */
function boxOf(width, height, hasRight) {
  const { left, top, right, bottom } = MARGIN
  return { left, top, width: width - left - (hasRight ? left : right), height: height - top - bottom }
}

/** The curves with their axis on the left; returns whether values lie beyond its edge. */
function drawCurves(pen, style, box, drawn, scale, [low, high], format) {
  const place = (value) => (scale.of(value) - low) / (high - low)
  drawValueAxis(pen, style, box, scale.ticks(low, high), place, format)
  let clipped = false
  for (const curve of drawn) clipped = drawCurve(pen, box, curve, place) || clipped
  return clipped
}

/** A curve with its own axis on the right, from zero. */
function drawRight(pen, style, box, curve) {
  const high = curve.points.reduce((most, point) => Math.max(most, point[2]), 0) * 1.05 || 1
  const edge = box.left + box.width
  pen.textAlign = 'left'
  pen.textBaseline = 'middle'
  for (const tick of ticks(high / 20, high)) {
    const y = box.top + box.height * (1 - tick / high)
    pen.fillStyle = curve.color
    pen.fillRect(edge, y - 0.5, 4, 1)
    pen.fillStyle = style.color
    pen.fillText(curve.format(tick), edge + 6, y)
  }
  drawCurve(pen, box, curve, (value) => value / high)
}

/** The canvas's empty context, in CSS pixels whatever the screen's resolution. */
function cleared(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio)
    canvas.height = Math.round(height * ratio)
  }
  const pen = canvas.getContext('2d')
  pen.setTransform(ratio, 0, 0, ratio, 0, 0)
  pen.clearRect(0, 0, width, height)
  return pen
}

/** The lowest and highest value of the curves on a scale, a tenth apart where they are flat but for rounding. */
function range(drawn, scale, robust, thinned) {
  let [low, high] = [Infinity, -Infinity]
  for (const curve of drawn) {
    let [least, most] = rangeOf(curve.points, scale, robust)
    if (robust && curve.within) {
      const other = drawn.find((one) => one.series === curve.within)
      const [under, over] = rangeOf(other?.points ?? thinned(curve.within), scale, robust)
      if (under < most && over > least) [least, most] = [Math.max(least, under), Math.min(most, over)]
    }
    low = Math.min(low, least)
    high = Math.max(high, most)
  }
  if (low <= high && high - low <= 1e-9 * Math.abs(high)) {
    return [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1]
  }
  return [low, high]
}

const SPARED = 0.02 // share of the columns that may be left out at each end, one at least
const FLATTENED = 3 // left out only where the others would have less than this part of the height

/** The range of a curve's points; with `robust` without the few that would flatten the others. */
function rangeOf(points, scale, robust) {
  const [lows, highs] = [1, 2].map((at) => points.map((point) => scale.of(point[at])).filter(Number.isFinite))
  const ascending = (one, other) => one - other
  lows.sort(ascending)
  highs.sort(ascending)
  if (!highs.length) return [Infinity, -Infinity]
  const [least, most] = [lows[0] ?? highs[0], highs[highs.length - 1]]
  if (!robust || highs.length < 5) return [least, most]
  const spared = Math.max(1, Math.floor(SPARED * highs.length))
  const [under, over] = [lows[Math.min(spared, lows.length - 1)], highs[highs.length - 1 - spared]]
  const span = Math.max(over - under, 1e-9 * Math.abs(over))
  const far = (FLATTENED - 1) * span
  return [least < under - far ? under - span / 10 : least, most > over + far ? over + span / 10 : most]
}

/** Axis values between two powers of ten, given as exponents: 1, 10, 100 …, or 1, 2, 5, 10 … where there are few. */
export function logTicks(low, high) {
  if (high - low < 0.7) return ticks(10 ** low, 10 ** high)
  const factors = high - low > 2 ? [1] : [1, 2, 5]
  const every = Math.ceil((high - low) / 6)
  const found = []
  for (let power = Math.floor(low); power <= high; power++) {
    if (power % every) continue
    for (const factor of factors) {
      const value = Number(`${factor}e${power}`)
      if (Math.log10(value) >= low && Math.log10(value) <= high) found.push(value)
    }
  }
  return found
}

function drawValueAxis(pen, style, box, values, place, format) {
  pen.fillStyle = style.color
  pen.strokeStyle = style.borderTopColor
  pen.lineWidth = 1
  pen.textAlign = 'right'
  pen.textBaseline = 'middle'
  for (const tick of values) {
    const y = box.top + box.height * (1 - place(tick))
    pen.beginPath()
    pen.moveTo(box.left, Math.round(y) + 0.5)
    pen.lineTo(box.left + box.width, Math.round(y) + 0.5)
    pen.stroke()
    pen.fillText(format(tick), box.left - 5, y)
  }
}

function drawStepAxis(pen, style, box, from, until) {
  pen.font = '10px sans-serif'
  pen.fillStyle = style.color
  pen.textAlign = 'center'
  pen.textBaseline = 'top'
  for (const tick of ticks(from, until, Math.max(3, Math.floor(box.width / 60)), 1)) {
    const x = box.left + (until > from ? ((tick - from) / (until - from)) * (box.width - 1) : 0)
    pen.fillText(String(tick), x, box.top + box.height + 4)
  }
}

const MARK = 8 // pixels between the marks of values beyond the edge

/** Draw a curve; values beyond the edge are drawn there, with a mark. Returns whether there are any. */
function drawCurve(pen, box, { points, color, width, dots }, place) {
  const bottom = box.top + box.height
  const y = (value) => bottom - box.height * Math.min(1, Math.max(0, place(value)))
  const beyond = { up: [], down: [] }
  pen.strokeStyle = pen.fillStyle = color
  pen.lineWidth = width ?? 1
  pen.lineJoin = 'round'
  pen.beginPath()
  for (const [at, least, most, first, final] of points) {
    const x = box.left + at
    pen.lineTo(x, y(first))
    if (least !== most) {
      pen.lineTo(x, y(least))
      pen.lineTo(x, y(most))
      pen.lineTo(x, y(final))
    }
    if (place(most) > 1 + 1e-9) beyond.up.push(x)
    if (place(least) < -1e-9) beyond.down.push(x)
  }
  pen.stroke()
  mark(pen, beyond.up, box.top, 5)
  mark(pen, beyond.down, bottom, -5)
  if (dots || points.length === 1) {
    for (const point of points) {
      pen.beginPath()
      pen.arc(box.left + point[0], y(point[4]), 2.5, 0, 7)
      pen.fill()
    }
  }
  return beyond.up.length + beyond.down.length > 0
}

/** Small triangles that point over an edge, in the curve's color. */
function mark(pen, places, edge, height) {
  let last = -Infinity
  for (const x of places) {
    if (x < last + MARK) continue
    last = x
    pen.beginPath()
    pen.moveTo(x, edge - Math.sign(height))
    pen.lineTo(x - 4, edge + height)
    pen.lineTo(x + 4, edge + height)
    pen.fill()
  }
}
