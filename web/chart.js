/** Line charts on a canvas element: any number of points, drawn as the extremes of each pixel column. */

const MARGIN = { left: 44, right: 10, top: 8, bottom: 18 }

/** Points of a curve that grow at the end: steps ascend, values may be missing (NaN). */
export class Series {
  constructor() {
    this.steps = []
    this.values = []
  }

  /** Add a point; a step that was there already, or later ones, give way: a run went back. */
  add(step, value) {
    while (this.steps.length && this.steps[this.steps.length - 1] >= step) {
      this.steps.pop()
      this.values.pop()
    }
    this.steps.push(step)
    this.values.push(value)
  }

  clear() {
    this.steps.length = this.values.length = 0
  }

  get last() {
    return this.values[this.values.length - 1]
  }
}

/** Exponential moving average without the bias of its start, as a Series of the same steps. */
export class Smoothed extends Series {
  constructor(weight = 0.9) {
    super()
    this.weight = weight
    this.sums = []
  }

  add(step, value) {
    while (this.steps.length && this.steps[this.steps.length - 1] >= step) {
      this.steps.pop()
      this.values.pop()
      this.sums.pop()
    }
    const [sum, mass] = this.sums[this.sums.length - 1] ?? [0, 0]
    const good = Number.isFinite(value)
    const next = good ? [sum * this.weight + value * (1 - this.weight), mass * this.weight + 1 - this.weight] : [sum, mass]
    this.sums.push(next)
    this.steps.push(step)
    this.values.push(next[1] ? next[0] / next[1] : NaN)
  }

  clear() {
    super.clear()
    this.sums.length = 0
  }
}

/** [first, last) step columns of a series as [x, low, high, last value] of at most `columns` pixel columns. */
export function decimated(series, from, until, columns) {
  const out = []
  const { steps, values } = series
  const scale = until > from ? (columns - 1) / (until - from) : 0
  let column = -1
  let entry = null
  for (let index = 0; index < steps.length; index++) {
    const value = values[index]
    if (!Number.isFinite(value)) continue
    const at = Math.round((steps[index] - from) * scale)
    if (at !== column) {
      entry = [at, value, value, value, value]
      out.push(entry)
      column = at
    } else {
      if (value < entry[1]) entry[1] = value
      if (value > entry[2]) entry[2] = value
      entry[4] = value
    }
  }
  return out
}

/** Rounded values between low and high for an axis, about `count` of them. */
export function ticks(low, high, count = 4) {
  const span = high - low || Math.abs(high) || 1
  const raw = span / count
  const power = 10 ** Math.floor(Math.log10(raw))
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw * 0.999)
  const out = []
  for (let at = Math.ceil(low / step - 1e-9) * step; at <= high + step * 1e-9; at += step) out.push(Number(at.toPrecision(12)))
  return out
}

/**
 * Draw curves [{series, color, width, dots}] into a canvas element of the given CSS size; returns what was drawn for tests:
 * {from, until, low, high}. Colors are CSS colors; text takes the canvas's own CSS color.
 */
export function draw(canvas, width, height, curves, format) {
  const ratio = window.devicePixelRatio || 1
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio)
    canvas.height = Math.round(height * ratio)
  }
  const pen = canvas.getContext('2d')
  pen.setTransform(ratio, 0, 0, ratio, 0, 0)
  pen.clearRect(0, 0, width, height)
  const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom }
  const shown = curves.filter((curve) => curve.series.steps.length)
  if (!shown.length || inner.width < 20 || inner.height < 20) return null
  const from = Math.min(...shown.map((curve) => curve.series.steps[0]))
  const until = Math.max(...shown.map((curve) => curve.series.steps[curve.series.steps.length - 1]))
  const drawn = shown.map((curve) => ({ ...curve, points: decimated(curve.series, from, until, Math.floor(inner.width)) }))
  let [low, high] = [Infinity, -Infinity]
  for (const { points } of drawn) {
    for (const point of points) {
      if (point[1] < low) low = point[1]
      if (point[2] > high) high = point[2]
    }
  }
  if (low > high) return null
  if (low === high) [low, high] = [low - Math.abs(low || 1) * 0.1, high + Math.abs(high || 1) * 0.1]
  const y = (value) => MARGIN.top + inner.height * (1 - (value - low) / (high - low))
  const style = getComputedStyle(canvas)
  pen.font = '10px sans-serif'
  pen.fillStyle = style.color
  pen.strokeStyle = style.borderTopColor
  pen.lineWidth = 1
  pen.textAlign = 'right'
  pen.textBaseline = 'middle'
  for (const tick of ticks(low, high)) {
    pen.beginPath()
    pen.moveTo(MARGIN.left, Math.round(y(tick)) + 0.5)
    pen.lineTo(width - MARGIN.right, Math.round(y(tick)) + 0.5)
    pen.stroke()
    pen.fillText(format(tick), MARGIN.left - 5, y(tick))
  }
  pen.textAlign = 'center'
  pen.textBaseline = 'top'
  for (const tick of ticks(from, until, Math.max(2, Math.floor(inner.width / 70)))) {
    const x = MARGIN.left + (until > from ? ((tick - from) / (until - from)) * (inner.width - 1) : 0)
    pen.fillText(String(tick), x, height - MARGIN.bottom + 4)
  }
  for (const { points, color, width: thickness, dots } of drawn) {
    pen.strokeStyle = pen.fillStyle = color
    pen.lineWidth = thickness ?? 1
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
    if (dots || points.length === 1) {
      for (const point of points) {
        pen.beginPath()
        pen.arc(MARGIN.left + point[0], y(point[4]), 2.5, 0, 7)
        pen.fill()
      }
    }
  }
  return { from, until, low, high }
}
