//! The keeping process.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use super::{Announcement, FORM, name};
use crate::model::error::{Error, ErrorKind, Result};
use crate::model::lease::LeaseState;
use crate::patterns::channel::{Channel, ListenBuilder, Listener, Message};
use crate::sharing::export::Export;
use crate::sharing::{ErrorWith, Ipc, RuntimeRef};

/// A keeper: answers the processes that ask for its name with an export; see [`Ipc::keep`](crate::Ipc::keep).
///
/// Dropping it frees the name and drops the export, unless [`export`](Self::export) has lent it elsewhere.
///
/// The keeper starts no thread: processes are answered while a thread calls [`answer`](Self::answer), or
/// [`try_answer`](Self::try_answer) when the descriptor ([`AsFd`]) is readable. Opening the memory needs no call, because the
/// library's threads serve it.
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
/// keeper.answer(Duration::from_secs(10))?;
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
    listener: Listener,
    current: RwLock<Current>,
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

#[derive(Clone, Debug)]
struct Current {
    version: u64,
    export: Arc<Export>,
}

impl Keeper {
    pub(crate) fn start(
        ipc: &Ipc,
        keeper: &str,
        version: u64,
        export: Arc<Export>,
    ) -> Result<Self, ErrorWith<Arc<Export>>> {
        Self::listen(ipc, keeper, (version, export), |builder| builder.start())
    }

    pub(crate) fn take_over(
        ipc: &Ipc,
        channel: &Channel,
        keeper: &str,
        version: u64,
        export: Arc<Export>,
    ) -> Result<Self, ErrorWith<Arc<Export>>> {
        Self::listen(ipc, keeper, (version, export), |builder| builder.take_over(channel))
    }

    fn listen(
        ipc: &Ipc,
        keeper: &str,
        (version, export): (u64, Arc<Export>),
        listen: impl FnOnce(ListenBuilder<'_>) -> Result<Listener>,
    ) -> Result<Self, ErrorWith<Arc<Export>>> {
        let listening =
            name::channel_name(keeper).and_then(|channel| listen(ListenBuilder::new(ipc, &channel)));
        match listening {
            Ok(listener) => {
                let changes = Changes(export.runtime());
                let current = RwLock::new(Current { version, export });
                Ok(Self { listener, current, changes })
            }
            Err(error) => Err(ErrorWith::new(error, export)),
        }
    }

    /// Returns the name.
    pub fn name(&self) -> &str {
        let name = self.listener.name();
        name.strip_prefix(name::PREFIX).unwrap_or(name)
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

    /// Waits for the next process that asks, and answers it.
    ///
    /// # Errors
    ///
    /// [`Error::Timeout`] if no process has asked; the errors of [`Listener::accept`]; [`Error::ExportDropped`] for an export that
    /// was shut down. A process that asks and does not wait for its answer is no error.
    pub fn answer(&self, timeout: Duration) -> Result<()> {
        self.send(&self.listener.accept(timeout)?)
    }

    /// Answers the next process if one has asked. Returns whether one has.
    ///
    /// # Errors
    ///
    /// As [`answer`](Self::answer), except for the timeout.
    pub fn try_answer(&self) -> Result<bool> {
        match self.listener.try_accept()? {
            Some(channel) => self.send(&channel).map(|()| true),
            None => Ok(false),
        }
    }

    /// Hands the name over to the process at the other end of a channel, which takes it by
    /// [`Ipc::take_over`](crate::Ipc::take_over); see [`Listener::hand_over`].
    ///
    /// # Errors
    ///
    /// As [`Listener::hand_over`].
    pub fn hand_over(&self, channel: &Channel) -> Result<()> {
        self.listener.hand_over(channel)?;
        self.changes.notify();
        Ok(())
    }

    /// Answers to the name again because the other process has not; see [`Listener::take_back`].
    ///
    /// # Errors
    ///
    /// As [`Listener::take_back`].
    pub fn take_back(&mut self) -> Result<()> {
        self.listener.take_back()
    }

    /// Frees the name, unless it was handed over, and returns the export.
    pub fn into_export(self) -> Arc<Export> {
        self.current.into_inner().unwrap_or_else(PoisonError::into_inner).export
    }

    fn current(&self) -> Current {
        self.current.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Sends the export. The channel may be dropped after that: its grant is kept until the receiver has opened or discarded the
    /// export, or has terminated.
    fn send(&self, channel: &Channel) -> Result<()> {
        // Until the message is sent: `replace` returns the last reference of the keeper.
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        let Current { version, export } = &*current;
        let readers = export.holders().count(LeaseState::InUse) as u64;
        let announcement = postcard::to_stdvec(&Announcement { form: FORM, version: *version, readers });
        let bytes = announcement.map_err(|error| Error::Protocol(error.to_string()))?;
        // The first message of a channel does not wait.
        match channel.try_send(Message::new().bytes(bytes).export(&**export)).map_err(Error::from) {
            // The process has not waited for its answer.
            Err(error) if matches!(error.kind(), ErrorKind::Gone | ErrorKind::Closed) => Ok(()),
            sent => sent,
        }
    }
}

impl AsFd for Keeper {
    /// Returns a descriptor that is readable while [`try_answer`](Self::try_answer) has something to do.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }
}

impl AsRawFd for Keeper {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}
