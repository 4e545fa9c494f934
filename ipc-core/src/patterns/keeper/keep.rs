//! The keeping process.

use std::sync::{Arc, PoisonError, RwLock};

use super::answers::{Answers, Current};
use super::name;
use crate::model::error::Result;
use crate::patterns::channel::{Channel, ListenBuilder, Listener};
use crate::sharing::export::Export;
use crate::sharing::{Ipc, RecoverableError, RuntimeRef};

/// A keeper: answers the processes that ask for its name with an export; see [`Ipc::keep`](crate::Ipc::keep).
///
/// Dropping it frees the name and drops the export, unless [`export`](Self::export) has lent it elsewhere.
///
/// The library's threads answer, and serve the opens of the memory: the program only keeps the guard. A callback of the library that
/// does not return delays the answers.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// use std::time::Duration;
///
/// let export = ipc.share(ipc.allocate(0, 1024)?).start()?;
/// let keeper = ipc.keep("example-keeper", 1, export)?;
/// # let peer = ipc.clone();
/// # let reader = std::thread::spawn(move || -> device_ipc_core::Result<u64> {
/// // In another process:
/// # let ipc = peer;
/// let kept = ipc.find("keeper:example-keeper", Duration::from_secs(10))?;
/// let mapping = kept.open().at_home()?;
/// # Ok(mapping.len() + kept.version()) });
/// # assert_eq!(reader.join().expect("the reader does not panic")?, 1025);
///
/// // A new version: processes that have the old one open are notified, and keep it.
/// let old = keeper.replace(2, ipc.share(ipc.allocate(0, 2048)?).start()?);
/// drop(old);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "dropping the keeper frees the name"]
pub struct Keeper {
    name: String,
    answers: Answers,
    current: Arc<RwLock<Current>>,
    changes: Changes,
}

/// Notifies importers that the name has another export, so that [`Mapping::follow`](crate::Mapping::follow) asks for it; also when
/// the keeper is dropped.
#[derive(Debug)]
struct Changes(RuntimeRef);

impl Changes {
    fn notify(&self) {
        if let Some(runtime) = self.0.here() {
            runtime.exports.count_change();
        }
    }
}

impl Drop for Changes {
    fn drop(&mut self) {
        self.notify();
    }
}

impl Keeper {
    pub(crate) fn start(
        ipc: &Ipc,
        keeper: &str,
        version: u64,
        export: Arc<Export>,
    ) -> Result<Self, RecoverableError<Arc<Export>>> {
        Self::listen(ipc, keeper, (version, export), |builder| builder.start())
    }

    pub(crate) fn take_over(
        ipc: &Ipc,
        channel: &Channel,
        keeper: &str,
        version: u64,
        export: Arc<Export>,
    ) -> Result<Self, RecoverableError<Arc<Export>>> {
        Self::listen(ipc, keeper, (version, export), |builder| builder.take_over(channel))
    }

    fn listen(
        ipc: &Ipc,
        keeper: &str,
        (version, export): (u64, Arc<Export>),
        listen: impl FnOnce(ListenBuilder<'_>) -> Result<Listener>,
    ) -> Result<Self, RecoverableError<Arc<Export>>> {
        let (runtime, next) = (export.runtime(), Current { version, export });
        let current = Arc::new(RwLock::new(next));
        let answers = name::channel_name(keeper)
            .and_then(|channel| listen(ListenBuilder::new(ipc, &channel)))
            .and_then(|listener| Answers::start(listener, Arc::downgrade(&current), runtime));
        match answers {
            Ok(answers) => Ok(Self { name: keeper.to_owned(), answers, current, changes: Changes(runtime) }),
            Err(error) => Err(RecoverableError::new(error, read(&current).export)),
        }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the version of the present export.
    pub fn version(&self) -> u64 {
        self.current().version
    }

    /// Returns the present export.
    pub fn export(&self) -> Arc<Export> {
        self.current().export
    }

    /// Answers with another export from now on, and returns the one before.
    ///
    /// Processes that have opened the former export go on. They are notified when it is dropped
    /// ([`Mapping::on_dropped`](crate::Mapping::on_dropped)), and its memory is freed when the last of them has released it. Mappings
    /// with reserved addresses [follow](crate::Mapping::follow) to the new one from now on.
    ///
    /// The result is the only reference, unless the caller has others: `Arc::into_inner` gives the export, for
    /// [`Export::close`], which waits until all processes have released it.
    pub fn replace(&self, version: u64, export: impl Into<Arc<Export>>) -> Arc<Export> {
        let next = Current { version, export: export.into() };
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let former = std::mem::replace(&mut *current, next).export;
        drop(current);
        // After the exchange: a process that sees the change and asks is answered with the new export.
        self.changes.notify();
        former
    }

    /// Hands the name over to the process at the other end of a channel, which takes it by
    /// [`Ipc::take_over`](crate::Ipc::take_over); see [`Listener::hand_over`]. This keeper answers no process from now on, unless
    /// it [takes the name back](Self::take_back).
    ///
    /// # Errors
    ///
    /// As [`Listener::hand_over`]. This keeper goes on answering.
    pub fn hand_over(&self, channel: &Channel) -> Result<()> {
        self.answers.hand_over(channel)?;
        self.changes.notify();
        Ok(())
    }

    /// Answers to the name again because the other process has not; see [`Listener::take_back`].
    ///
    /// # Errors
    ///
    /// As [`Listener::take_back`].
    pub fn take_back(&self) -> Result<()> {
        self.answers.take_back()
    }

    /// Frees the name, unless it was handed over, and returns the export.
    pub fn into_export(self) -> Arc<Export> {
        let Self { answers, current, .. } = self;
        drop(answers);
        let former = Arc::try_unwrap(current).map(|current| current.into_inner());
        match former {
            Ok(current) => current.unwrap_or_else(PoisonError::into_inner).export,
            // A forked child, whose parent answered a process.
            Err(current) => read(&current).export,
        }
    }

    fn current(&self) -> Current {
        read(&self.current)
    }
}

fn read(current: &RwLock<Current>) -> Current {
    current.read().unwrap_or_else(PoisonError::into_inner).clone()
}
