//! Every export on this machine that this user may see.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::conversation::{Conversation, Deadline, Inbox};
use super::protocol::{ListedExport, Reply, Request, RequestId};
use super::{AllowList, BrokerAddress, SOCKET_DIR_VARIABLE};
use crate::descriptor::ExportId;
use crate::error::{Error, Result};
use crate::process::ProcessIdentity;

/// What the names of all brokers' sockets begin with.
pub(super) const SOCKET_NAME: &str = "device-ipc-";

/// A process that shares memory.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ListedProcess {
    /// Its process id here; 0 for a process of another pid namespace.
    pub pid: u32,
    /// Its program, as the kernel calls it; empty where that cannot be told.
    pub program: String,
    /// Where it listens.
    pub socket: BrokerAddress,
    /// Who it is.
    pub process: ProcessIdentity,
    /// Its exports that this process might open.
    pub exports: Vec<ListedExport>,
}

/// Asks every broker of this network namespace, and of the socket directory where there is one, for its exports.
///
/// Brokers of users whom `allow` does not list are passed over, as are processes that end meanwhile. One that does not
/// answer within `patience` is an error in its place.
///
/// # Errors
///
/// [`Error::Io`] where `/proc/net/unix` or the directory cannot be read.
pub fn list_exports(
    directory: Option<&Path>,
    allow: &AllowList,
    patience: Duration,
) -> Result<Vec<Result<ListedProcess>>> {
    let from_environment =
        || std::env::var_os(SOCKET_DIR_VARIABLE).filter(|path| !path.is_empty()).map(PathBuf::from);
    let mut addresses = abstract_sockets()?;
    if let Some(directory) = directory.map(Path::to_owned).or_else(from_environment) {
        addresses.extend(sockets_in(&directory)?);
    }
    let asked = addresses.into_iter().map(|address| ask(address, allow, Deadline::after(patience)));
    let mut processes: Vec<_> = asked
        .filter(|asked| !matches!(asked, Err(Error::ExporterGone { .. } | Error::NotPermitted(_))))
        .collect();
    processes.sort_by_key(|process| process.as_ref().map_or(0, |process| process.pid));
    Ok(processes)
}

/// The name stands last in a line, behind an `@` (proc_net(5)).
fn abstract_sockets() -> Result<Vec<BrokerAddress>> {
    let path = "/proc/net/unix";
    let table = fs::read(path).map_err(|error| Error::io(format!("reading {path}"), error))?;
    let mut names: Vec<&[u8]> = table
        .split(|byte| *byte == b'\n')
        .filter_map(|line| line.rsplit(|byte| *byte == b' ').next()?.strip_prefix(b"@"))
        .filter(|name| name.starts_with(SOCKET_NAME.as_bytes()))
        .collect();
    // A listener and its connections all bear its name.
    names.sort_unstable();
    names.dedup();
    Ok(names.into_iter().map(|name| BrokerAddress::Abstract(name.to_vec())).collect())
}

pub(super) fn sockets_in(directory: &Path) -> Result<Vec<BrokerAddress>> {
    let failed = |error| Error::io(format!("reading {}", directory.display()), error);
    let directory = std::path::absolute(directory).map_err(failed)?;
    let mut sockets = Vec::new();
    for entry in fs::read_dir(&directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if OsStr::as_bytes(&name).starts_with(SOCKET_NAME.as_bytes()) {
            sockets.push(BrokerAddress::Path(directory.join(name)));
        }
    }
    Ok(sockets)
}

fn ask(address: BrokerAddress, allow: &AllowList, deadline: Deadline) -> Result<ListedProcess> {
    let (conversation, process) = Conversation::connect(&address, None, allow, deadline)?;
    let (mut exports, mut inbox) = (Vec::new(), Inbox::default());
    let mut after = ExportId(0);
    loop {
        conversation.send(&Request::List { request: RequestId(0), after }, deadline)?;
        match conversation.receive(&mut inbox, deadline)?.0 {
            Reply::Listing { exports: page, more, .. } => {
                let last = page.last().map(|export| export.export);
                exports.extend(page);
                match last.filter(|last| more && *last > after) {
                    Some(last) => after = last,
                    None => break,
                }
            }
            _ => {
                return Err(Error::Protocol(
                    "it answered a question for its exports with something else".into(),
                ));
            }
        }
    }
    let pid = conversation.server().pid;
    let program = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned();
    Ok(ListedProcess { pid, program, socket: address, process, exports })
}
