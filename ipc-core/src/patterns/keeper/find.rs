//! The process that opens what a keeper keeps.

use std::sync::Arc;
use std::time::Duration;

use super::{Announcement, FORM, name};
use crate::model::error::{Error, ErrorKind, Result};
use crate::os::clock;
use crate::os::process::ProcessIdentity;
use crate::patterns::channel::{Channel, ConnectBuilder, Received, ReceivedExport};
use crate::sharing::Ipc;
use crate::sharing::import::{KeeperAddress, OpenBuilder};
use crate::transport::{Deadline, check_may_wait};
use crate::wire::descriptor::Descriptor;

/// The pause after a keeper has terminated before it answered: another one may take its place.
const RETRY: Duration = Duration::from_millis(2);

/// A search for a keeper; see [`Ipc::find`](crate::Ipc::find).
#[derive(Debug)]
pub(crate) struct Search<'a> {
    ipc: &'a Ipc,
    name: &'a str,
    user: Option<u32>,
    timeout: Duration,
    /// Whether the keeper has to exist now.
    exists: bool,
}

impl<'a> Search<'a> {
    pub(crate) fn new(ipc: &'a Ipc, text: &'a str, timeout: Duration) -> Self {
        let (user, name) = name::parse(text);
        Self { ipc, name, user, timeout, exists: false }
    }

    /// Returns the search for a keeper that has answered before, which fails at once if it does not exist.
    pub(super) fn again(ipc: &'a Ipc, keeper: &'a KeeperAddress, timeout: Duration) -> Self {
        Self { ipc, name: &keeper.name, user: keeper.user, timeout, exists: true }
    }

    /// Waits until a keeper of the name has answered.
    pub(crate) fn run(self) -> Result<KeeperExport> {
        let channel = name::channel_name(self.name)?;
        check_may_wait("asking a keeper", self.timeout)?;
        let deadline = Deadline::after(self.timeout);
        loop {
            let connect = ConnectBuilder::new(self.ipc, &channel, deadline.left());
            let connect = match self.user {
                Some(user) => connect.user(user),
                None => connect,
            };
            let connect = if self.exists { connect.existing() } else { connect };
            match self.ask(connect, deadline) {
                Err(error)
                    if matches!(error.kind(), ErrorKind::Gone | ErrorKind::Closed)
                        && !deadline.left().is_zero() =>
                {
                    clock::sleep(RETRY);
                }
                // The error states the timeout that the caller has set.
                Err(Error::NoListener { name, detail, .. }) if !self.exists => {
                    return Err(Error::NoListener { name, after: self.timeout, detail });
                }
                found => return found,
            }
        }
    }

    fn ask(&self, connect: ConnectBuilder<'_>, deadline: Deadline) -> Result<KeeperExport> {
        let channel = connect.start()?;
        let answer = channel.receive(deadline.left())?;
        KeeperExport::new(&channel, answer, KeeperAddress { name: self.name.to_owned(), user: self.user })
    }
}

/// The answer of a keeper: its export, which can be opened once even if it is replaced meanwhile.
///
/// # Examples
///
/// ```no_run
/// # use std::time::Duration;
/// # fn main() -> device_ipc_core::Result<()> {
/// # let ipc: device_ipc_core::Ipc = unimplemented!();
/// let kept = ipc.find("keeper:llama", Duration::from_secs(30))?;
/// let weights = kept.open().at_home()?;
/// weights.on_dropped(|| println!("there is a new version")); // the mapping stays valid
/// for (name, tensor) in weights.tensors() {
///     println!("{name}: {:?}", tensor.shape());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct KeeperExport {
    export: ReceivedExport,
    announcement: Announcement,
    process: ProcessIdentity,
    program: String,
    keeper: Arc<KeeperAddress>,
}

impl KeeperExport {
    fn new(channel: &Channel, answer: Received, keeper: KeeperAddress) -> Result<Self> {
        let announcement: Announcement = postcard::from_bytes(answer.bytes())
            .map_err(|_| Error::Protocol("its answer is not that of a keeper".into()))?;
        if announcement.form != FORM {
            return Err(Error::Protocol(format!(
                "its answer has form {}, and this version of the library reads form {FORM}; use one version of the library in both \
                 processes",
                announcement.form
            )));
        }
        let [export] = <[ReceivedExport; 1]>::try_from(answer.into_exports()).map_err(|exports| {
            Error::Protocol(format!("its answer has {} exports instead of one", exports.len()))
        })?;
        let (process, program) = (*channel.peer(), channel.program().to_owned());
        Ok(Self { export, announcement, process, program, keeper: Arc::new(keeper) })
    }

    /// Opens the memory, all of it or nothing; see [`OpenBuilder`]. A mapping with [reserved](OpenBuilder::reserved) addresses can
    /// [follow](crate::Mapping::follow) the keeper to newer versions.
    pub fn open(&self) -> OpenBuilder<'_> {
        self.export.open().kept_by(&self.keeper)
    }

    /// Returns the version that the keeper gives to this export.
    pub const fn version(&self) -> u64 {
        self.announcement.version
    }

    /// Returns the number of processes that used the export when the keeper answered.
    pub const fn readers(&self) -> u64 {
        self.announcement.readers
    }

    /// Returns the descriptor of the memory. Other processes may open it too, until the keeper replaces the export.
    pub const fn descriptor(&self) -> &Descriptor {
        self.export.descriptor()
    }

    /// Returns the identity of the keeper's process.
    pub const fn process(&self) -> &ProcessIdentity {
        &self.process
    }

    /// Returns the keeper's program name, as it states it.
    pub fn program(&self) -> &str {
        &self.program
    }
}
