/** A desktop notice when a training step has ended: for a person who has asked for it in the settings. */
import { duration, short } from './dom.js'
import { api, app } from './editor.js'
import { onSetting, setting } from './settings.js'
import { t } from './texts.js'

const SETTING = 'Graft.Training.Notice'
const ENDED = {
  done: 'training is done',
  stopped: 'training was stopped',
  interrupted: 'training was interrupted',
  failed: 'training has failed',
}

/** Show a notice at each end from now on, and ask for permission when a person switches the setting on. */
export function listen() {
  api.addEventListener('graft.end', ({ detail }) => setting(SETTING) && notify(detail.summary))
  onSetting(SETTING, (isOn, before) => isOn && before === false && askPermission())
}

async function askPermission() {
  if (window.Notification && (await Notification.requestPermission()) === 'granted') return
  app.extensionManager?.toast?.add({
    severity: 'warn',
    summary: t('No desktop notices'),
    detail: t(
      'The browser does not allow them for this page. Allow notifications in its settings; it needs https or localhost.',
    ),
    life: 10000,
  })
}

/** A step that found its result in the store has not trained, and is not news. */
function notify({ run, ended, step, steps, until, loss, seconds }) {
  if (window.Notification?.permission !== 'granted' || !(steps || ended === 'failed')) return
  const body = t('step {step} of {until}, loss {loss}, {time}', {
    step,
    until,
    loss: short(loss),
    time: duration(seconds),
  })
  // two tabs that both hear of it show one
  const notice = new Notification(`${run}: ${t(ENDED[ended])}`, { body, tag: `graft ${run}` })
  notice.onclick = () => {
    window.focus()
    notice.close()
  }
}
