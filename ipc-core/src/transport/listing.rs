//! A list of all exports on this machine that this user may see.

use std::collections::VecDeque;
use std::ffi::OsStr;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::AllowList;
use super::conversation::{CONNECT_RETRY, Conversation, Deadline, ReceiveBuffer, queue_is_full, try_connect};
use super::socket_file::SocketName;
use crate::model::error::{Error, Result};
use crate::os::clock;
use crate::os::environment::nonempty_variable;
use crate::os::process::ProcessIdentity;
use crate::wire::descriptor::ExportId;
use crate::wire::protocol::{ListedExport, Reply, Request, RequestId};
use crate::wire::short_name;
use crate::wire::{BrokerAddress, SOCKET_DIR_VARIABLE};

/// A process that shares memory.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ListedProcess {
    /// Its process id here; 0 for a process of another pid namespace.
    pub pid: u32,
    /// Its program, as the kernel names it; empty where that is unknown.
    pub program: String,
    /// The address at which it listens.
    pub socket: BrokerAddress,
    /// Its identity.
    pub process: ProcessIdentity,
    /// Its exports that this process might open.
    pub exports: Vec<ListedExport>,
}

/// Maximum number of brokers that are queried at a time.
const MAX_ASKED: usize = 64;

/// Queries every broker of this network namespace, and of the socket directory where there is one, for its exports. All brokers
/// are queried at the same time, with one timeout, `timeout`.
///
/// Brokers of users that `allow` does not list are skipped, as are processes that terminate meanwhile. A broker that does
/// not reply in time is an error in the list.
///
/// # Errors
///
/// [`Error::Io`] where `/proc/net/unix` or the directory cannot be read.
pub fn list_exports(
    directory: Option<&Path>,
    allow: &AllowList,
    timeout: Duration,
) -> Result<Vec<Result<ListedProcess>>> {
    let from_environment = || nonempty_variable(SOCKET_DIR_VARIABLE).map(PathBuf::from);
    let mut addresses = abstract_sockets()?;
    if let Some(directory) = directory.map(Path::to_owned).or_else(from_environment) {
        addresses.extend(sockets_in(&directory)?);
    }
    let mut processes = ask_all(&addresses, allow, Deadline::after(timeout));
    processes.retain(|asked| !matches!(asked, Err(Error::ExporterGone { .. } | Error::NotPermitted(_))));
    processes.sort_by_key(|process| process.as_ref().map_or(0, |process| process.pid));
    Ok(processes)
}

/// Queries each broker on a dedicated thread, as soon as it accepts connections: neither a full queue nor a broker that does not
/// reply delays the others.
fn ask_all(addresses: &[BrokerAddress], allow: &AllowList, deadline: Deadline) -> Vec<Result<ListedProcess>> {
    let answers = Mutex::new(Vec::new());
    let asked = AtomicUsize::new(0);
    let answer = |answer| answers.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
    std::thread::scope(|scope| {
        let mut waiting: VecDeque<_> = addresses.iter().collect();
        while !waiting.is_empty() {
            for _ in 0..waiting.len() {
                let Some(address) = waiting.pop_front() else { break };
                let socket = match try_connect(address, 0) {
                    Ok(Some(socket)) if asked.load(Ordering::Acquire) < MAX_ASKED => socket,
                    Ok(_) if deadline.left().is_zero() => {
                        answer(Err(queue_is_full(address, deadline)));
                        continue;
                    }
                    Ok(_) => {
                        waiting.push_back(address);
                        continue;
                    }
                    Err(error) => {
                        answer(Err(error));
                        continue;
                    }
                };
                asked.fetch_add(1, Ordering::AcqRel);
                let (asked, answer) = (&asked, &answer);
                scope.spawn(move || {
                    answer(ask(socket, address, allow, deadline));
                    asked.fetch_sub(1, Ordering::AcqRel);
                });
            }
            if !waiting.is_empty() {
                clock::sleep(CONNECT_RETRY);
            }
        }
    });
    answers.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// Lists the abstract sockets of brokers.
fn abstract_sockets() -> Result<Vec<BrokerAddress>> {
    Ok(abstract_names(SocketName::is_published)?
        .into_iter()
        .map(|name| BrokerAddress::Abstract(name.into()))
        .collect())
}

/// Lists the names of the abstract sockets of this network namespace that fit, each once. The name is the last field of a
/// line, after an `@` (proc_net(5)).
pub(crate) fn abstract_names(fits: impl Fn(&[u8]) -> bool) -> Result<Vec<Vec<u8>>> {
    let path = "/proc/net/unix";
    let table = fs::read(path).map_err(|error| Error::io(format!("reading {path}"), error))?;
    let mut names: Vec<&[u8]> = table
        .split(|byte| *byte == b'\n')
        // The flag of a socket that listens (`__SO_ACCEPTCON`): any process may bind names at will.
        .filter(|line| line.split(|byte| *byte == b' ').nth(3) == Some(b"00010000"))
        .filter_map(|line| line.rsplit(|byte| *byte == b' ').next()?.strip_prefix(b"@"))
        .filter(|name| fits(name))
        .collect();
    // A listener and its connections have the same name.
    names.sort_unstable();
    names.dedup();
    Ok(names.into_iter().map(<[u8]>::to_vec).collect())
}

fn sockets_in(directory: &Path) -> Result<Vec<BrokerAddress>> {
    let names = names_in(directory, SocketName::is_published)?;
    let directory = std::path::absolute(directory)
        .map_err(|error| Error::io(format!("reading {}", directory.display()), error))?;
    Ok(names
        .into_iter()
        .map(|name| BrokerAddress::Path(directory.join(OsStr::from_bytes(&name)).into()))
        .collect())
}

/// Lists the names of the files in a directory that fit.
pub(crate) fn names_in(directory: &Path, fits: impl Fn(&[u8]) -> bool) -> Result<Vec<Vec<u8>>> {
    let failed = |error| Error::io(format!("reading {}", directory.display()), error);
    let mut names = Vec::new();
    for entry in fs::read_dir(directory).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        if fits(name.as_bytes()) {
            names.push(name.into_encoded_bytes());
        }
    }
    Ok(names)
}

fn ask(
    socket: OwnedFd,
    address: &BrokerAddress,
    allow: &AllowList,
    deadline: Deadline,
) -> Result<ListedProcess> {
    let (conversation, process) = Conversation::over(socket, address, None, allow, deadline)?;
    let (mut exports, mut inbox) = (Vec::new(), ReceiveBuffer::default());
    let mut after = ExportId(0);
    loop {
        conversation.send(&Request::List { request: RequestId(0), after }, deadline)?;
        match conversation.receive(&mut inbox, deadline)?.0 {
            Reply::Listing { exports: page, more, .. } => {
                let last = page.last().map(|export| export.export);
                exports.extend(page.into_iter().map(shown));
                match last.filter(|last| more && *last > after) {
                    Some(last) => after = last,
                    None => break,
                }
            }
            _ => {
                return Err(Error::Protocol("it sent another reply to a request for its exports".into()));
            }
        }
    }
    let pid = conversation.server().pid;
    Ok(ListedProcess { pid, program: program_of(pid), socket: address.clone(), process, exports })
}

/// Makes an exporter's texts about an export printable.
fn shown(mut export: ListedExport) -> ListedExport {
    export.backend = short_name(&export.backend);
    for holder in &mut export.holders {
        holder.program = short_name(&holder.program);
    }
    export
}

/// Returns the name that the kernel has for a process's program, which the process may have chosen (prctl(2)); empty where
/// it cannot be read.
pub(crate) fn program_of(pid: u32) -> String {
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    short_name(String::from_utf8_lossy(&name).trim_end_matches('\n'))
}

#[cfg(test)]
mod tests;
