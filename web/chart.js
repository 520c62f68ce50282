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

/** About `count` rounded axis values between low and high; none when these are too close together to tell apart. */
export function ticks(low, high, count = 4) {
  const raw = (high - low || Math.abs(high) || 1) / count
  const power = 10 ** Math.floor(Math.log10(raw))
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999)
  const [first, last] = [Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9)]
  if (!(last - first <= 10 * count)) return [] // not numbers, or steps below their precision
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, index) =>
    Number(((first + index) * step).toPrecision(12)),
  )
}

/**
 * Draw curves [{series, color, width, dots}] into a canvas element of the given CSS size. Returns the drawn range
 * {from, until, low, high} for tests, or null when there is nothing to draw. Colors are CSS colors; text takes the
 * canvas's own CSS color.
 */
export function draw(canvas, width, height, curves, format) {
  if (!canvas.isConnected) return null // it has no colors yet
  const pen = cleared(canvas, width, height)
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom }
  const shown = curves.filter((curve) => curve.series.steps.length)
  if (!shown.length || inner.width < 20 || inner.height < 20) return null
  const from = Math.min(...shown.map((curve) => curve.series.steps[0]))
  const until = Math.max(...shown.map((curve) => curve.series.steps[curve.series.steps.length - 1]))
  const drawn = shown.map((curve) => ({
    ...curve,
    points: decimated(curve.series, from, until, Math.floor(inner.width)),
  }))
  const [low, high] = range(drawn)
  if (low > high) return null
  const y = (value) => MARGIN.top + inner.height * (1 - (value - low) / (high - low))
  drawValueAxis(pen, canvas, width, ticks(low, high), y, format)
  drawStepAxis(pen, height, inner.width, from, until)
  for (const curve of drawn) drawCurve(pen, curve, y)
  return { from, until, low, high }
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

/** The lowest and highest value of the curves, a tenth apart where the curves are flat but for rounding. */
function range(drawn) {
  let [low, high] = [Infinity, -Infinity]
  for (const { points } of drawn) {
    for (const point of points) {
      if (point[1] < low) low = point[1]
      if (point[2] > high) high = point[2]
    }
  }
  if (low <= high && high - low <= 1e-9 * Math.abs(high)) {
    return [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1]
  }
  return [low, high]
}

function drawValueAxis(pen, canvas, width, values, y, format) {
  const style = getComputedStyle(canvas)
  pen.font = '10px sans-serif'
  pen.fillStyle = style.color
  pen.strokeStyle = style.borderTopColor
  pen.lineWidth = 1
  pen.textAlign = 'right'
  pen.textBaseline = 'middle'
  for (const tick of values) {
    pen.beginPath()
    pen.moveTo(MARGIN.left, Math.round(y(tick)) + 0.5)
    pen.lineTo(width - MARGIN.right, Math.round(y(tick)) + 0.5)
    pen.stroke()
    pen.fillText(format(tick), MARGIN.left - 5, y(tick))
  }
}

function drawStepAxis(pen, height, innerWidth, from, until) {
  pen.textAlign = 'center'
  pen.textBaseline = 'top'
  for (const tick of ticks(from, until, Math.max(3, Math.floor(innerWidth / 60)))) {
    const x = MARGIN.left + (until > from ? ((tick - from) / (until - from)) * (innerWidth - 1) : 0)
    pen.fillText(String(tick), x, height - MARGIN.bottom + 4)
  }
}

function drawCurve(pen, { points, color, width, dots }, y) {
  pen.strokeStyle = pen.fillStyle = color
  pen.lineWidth = width ?? 1
  pen.lineJoin = 'round'
  pen.beginPath()
  for (const [at, least, most, first, final] of points) {
    const x = MARGIN.left + at
    pen.lineTo(x, y(first))
    if (least !== most) {
      pen.lineTo(x, y(least))
      pen.lineTo(x, y(most))
      pen.lineTo(x, y(final))
    }
  }
  pen.stroke()
  if (!dots && points.length !== 1) return
  for (const point of points) {
    pen.beginPath()
    pen.arc(MARGIN.left + point[0], y(point[4]), 2.5, 0, 7)
    pen.fill()
  }
}
