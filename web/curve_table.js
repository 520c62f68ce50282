/** A run's curves as a table in CSV, the same as `training/reports/curve_table.py` writes, and how a page saves it. */
import { el } from './dom.js'

/** CSV of {header: Series}: a row for each step at which something was measured, and empty cells where nothing was. */
export function curveTable(columns) {
  const all = Object.values(columns)
  const steps = [...new Set(all.flatMap((series) => series.steps))].sort((one, other) => one - other)
  const cell = (series, step) => {
    const at = series.until(step)
    return at.step === step && Number.isFinite(at.value) ? String(at.value) : ''
  }
  const rows = steps.map((step) => [step, ...all.map((series) => cell(series, step))].join(','))
  return [['step', ...Object.keys(columns)].join(','), ...rows, ''].join('\n')
}

/** Have the browser save a text as a file. */
export function saveText(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: 'text/csv' }))
  el('a', { href: address, download: name }).click()
  URL.revokeObjectURL(address)
}
