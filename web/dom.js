/** Building of elements; text is always text, never markup. */

/** An element with properties (class, title, on… handlers, ARIA attributes) and children (elements or text). */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag)
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue
    if (name === 'class') element.className = value
    else if (name.startsWith('on')) element.addEventListener(name.slice(2), value)
    else if (name in element && !name.startsWith('aria')) element[name] = value
    else element.setAttribute(name, value)
  }
  element.append(...children.filter((child) => child !== null && child !== undefined))
  return element
}

/** Put the style sheet of the pack into the page, once. */
export function addStyle() {
  const href = new URL('./graft.css', import.meta.url).href
  if (!document.querySelector(`link[href="${href}"]`)) document.head.append(el('link', { rel: 'stylesheet', href }))
}

const RECOLORED = 'graft-recolored'

/** Call `act` when another theme of the editor has changed the colors of a chart. */
export const whenRecolored = (chart, act) => chart.addEventListener(RECOLORED, () => act())

/** Tell the charts on the page of another theme, once: its colors are properties of the page's root. */
export function watchTheme() {
  const colors = () =>
    ['--descrip-text', '--input-text'].map((name) => getComputedStyle(document.body).getPropertyValue(name))
  let before = colors().join()
  const look = () => {
    const now = colors().join()
    if (now === before) return
    before = now
    for (const chart of document.querySelectorAll('.graft-chart')) chart.dispatchEvent(new Event(RECOLORED))
  }
  const watcher = new MutationObserver(() => requestAnimationFrame(look))
  for (const element of [document.documentElement, document.body]) watcher.observe(element, { attributes: true })
}

/** Whether what is dragged holds files. */
export const hasFiles = (event) => [...(event.dataTransfer?.types ?? [])].includes('Files')

/** A number with few digits: 0.00012 -> 1.2e-4, 0.1234 -> 0.123. */
export function short(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–'
  const magnitude = Math.abs(value)
  return magnitude !== 0 && (magnitude < 1e-3 || magnitude >= 1e6)
    ? value.toExponential(digits - 2)
    : String(Number(value.toPrecision(digits)))
}

/** Seconds in words: 75 -> 1 min 15 s. */
export function duration(seconds) {
  if (!Number.isFinite(seconds)) return '–'
  const whole = Math.round(seconds)
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor((whole % 3600) / 60)]
  if (hours) return `${hours} h ${minutes} min`
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`
}

/** Bytes in words: 3221225472 -> 3.0 GB. */
export function size(bytes) {
  if (!Number.isFinite(bytes)) return '–'
  const units = ['B', 'kB', 'MB', 'GB', 'TB']
  let unit = 0
  while (bytes >= 1000 && unit < units.length - 1) [bytes, unit] = [bytes / 1000, unit + 1]
  return `${unit && bytes < 10 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`
}
