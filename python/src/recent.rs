//! Exports of tensors that were sent over a channel a moment ago: a tensor that is sent again needs no export, no event and no lease
//! of its own.
//!
//! An export keeps its memory allocated, and a tensor that the caller has dropped, or given other memory (`tensor.data = …`), must not:
//! an export ends with the tensor's object, or [`LIFETIME`] after it was last sent.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use device_ipc::{DeviceOrdinal, DeviceRange, Ipc, TensorLayout};
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple, PyWeakrefReference};

use crate::exchange::Exchange;
use crate::share::{self, Source};

/// The time for which an export stays after it was last sent.
const LIFETIME: Duration = Duration::from_secs(1);

/// The interval at which exports that have not been sent for a while are looked for.
const LOOK: Duration = Duration::from_millis(250);

struct Recent {
    export: Arc<device_ipc::Export>,
    ipc: Ipc,
    region: DeviceRange,
    layout: TensorLayout,
    sent: Instant,
    /// Ends this entry with the tensor.
    _tensor: Py<PyWeakrefReference>,
}

#[derive(Default)]
struct Table {
    /// By the address of the tensor's object.
    recent: Option<HashMap<usize, Recent>>,
    has_thread: bool,
}

static TABLE: Mutex<Table> = Mutex::new(Table { recent: None, has_thread: false });

/// Returns the export of a PyTorch tensor, an existing one or a new one, with its entry point and device; `None` for other objects.
///
/// The export is not behind any work: the message that it is sent with has to be ready on a stream.
pub(crate) fn export_of(
    tensor: &Bound<'_, PyAny>,
) -> PyResult<Option<(Arc<device_ipc::Export>, Ipc, DeviceOrdinal)>> {
    let py = tensor.py();
    if Exchange::of_known(tensor).is_none() {
        return Ok(None);
    }
    let Some(source) = Source::read(py, tensor)? else { return Ok(None) };
    let key = tensor.as_ptr() as usize;
    let (known, changed) = {
        let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = table.recent.get_or_insert_default();
        match recent.get_mut(&key) {
            Some(known) if known.region == source.region && known.layout == source.layout => {
                known.sent = Instant::now();
                (Some((Arc::clone(&known.export), known.ipc.clone(), known.region.device)), None)
            }
            Some(_) => (None, recent.remove(&key)),
            None => (None, None),
        }
    };
    // The tensor has other memory now.
    drop(changed);
    if known.is_some() {
        return Ok(known);
    }
    let ended = PyCFunction::new_closure(
        py,
        None,
        None,
        move |_: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| {
            // A forked child may find the lock taken for ever.
            let ended = TABLE.try_lock().ok().and_then(|mut table| table.recent.as_mut()?.remove(&key));
            drop(ended);
        },
    )?;
    let reference = PyWeakrefReference::new_with(tensor, ended)?.unbind();
    let (region, layout) = (source.region, source.layout.clone());
    let (export, ipc) = share::start(py, source)?;
    let export = Arc::new(export);
    let entry = Recent {
        export: Arc::clone(&export),
        ipc: ipc.clone(),
        region,
        layout,
        sent: Instant::now(),
        _tensor: reference,
    };
    let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
    let replaced = table.recent.get_or_insert_default().insert(key, entry);
    let starts_thread = !std::mem::replace(&mut table.has_thread, true);
    drop(table);
    drop(replaced);
    if starts_thread && thread::Builder::new().name("device-ipc-recent".to_owned()).spawn(end_old).is_err() {
        TABLE.lock().unwrap_or_else(PoisonError::into_inner).has_thread = false;
    }
    Ok(Some((export, ipc, region.device)))
}

/// Ends exports that have not been sent for a while, until there are none.
fn end_old() {
    loop {
        thread::sleep(LOOK);
        let mut table = TABLE.lock().unwrap_or_else(PoisonError::into_inner);
        let recent = table.recent.get_or_insert_default();
        let old: Vec<_> = recent.extract_if(|_, one| one.sent.elapsed() >= LIFETIME).collect();
        let is_last = recent.is_empty();
        table.has_thread = !is_last;
        drop(table);
        let mut old = Some(old);
        Python::try_attach(|_| drop(old.take()));
        // The interpreter is shutting down, and the process with it.
        std::mem::forget(old);
        if is_last {
            return;
        }
    }
}
