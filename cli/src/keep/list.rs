//! `device-ipc keep --list`: the keepers on this machine.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Result;
use comfy_table::{Table, presets};
use device_ipc::front_end::{KeeperName, list_keepers};
use device_ipc::{Error, ErrorKind, Ipc, KeeperExport};
use indicatif::HumanBytes;
use serde_json::{Value, json};

use crate::output;

/// The time after which a keeper without a listener is taken for one that has ended since it was listed.
const ENDED: Duration = Duration::from_millis(500);

/// Maximum number of keepers that are asked at the same time.
const MAX_ASKED: usize = 16;

/// The answer of a keeper.
type Answer = Result<KeeperExport, Error>;

/// Asks a keeper. A search waits for a keeper that does not run yet; one that has ended meanwhile is not waited for.
fn ask(ipc: &Ipc, keeper: &KeeperName, timeout: Duration) -> Result<KeeperExport, Error> {
    let name = keeper.to_string();
    let find = |timeout| ipc.find(&name, timeout);
    match find(timeout.min(ENDED)) {
        Err(Error::Timeout { .. }) if timeout > ENDED => find(timeout - ENDED),
        found => found,
    }
}

/// Asks all keepers, several at the same time: a keeper that is stopped delays no other. Any process can listen under a keeper's name,
/// so the number of threads is bounded, and the timeout is that of all of them together. Those of this user are asked first.
fn ask_all(ipc: &Ipc, mut names: Vec<KeeperName>, timeout: Duration) -> Vec<(KeeperName, Answer)> {
    let user = rustix::process::geteuid().as_raw();
    names.sort_by_key(|keeper| (keeper.user != user, keeper.clone()));
    let (workers, end) = (names.len().min(MAX_ASKED), Instant::now() + timeout);
    let (names, asked) = (Mutex::new(VecDeque::from(names)), Mutex::new(Vec::new()));
    let next = || names.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let work = || {
        while let Some(keeper) = next() {
            let left = end.saturating_duration_since(Instant::now());
            let found = match left.is_zero() {
                true => Err(Error::Timeout {
                    what: "its turn to be asked".into(),
                    after: timeout,
                    detail: String::new(),
                }),
                false => ask(ipc, &keeper, left),
            };
            asked.lock().unwrap_or_else(PoisonError::into_inner).push((keeper, found));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..workers {
            // With fewer threads it takes longer.
            if std::thread::Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    let mut asked = asked.into_inner().unwrap_or_else(PoisonError::into_inner);
    asked.sort_by(|(one, _), (other, _)| one.cmp(other));
    asked
}

pub(super) fn run(ipc: &Ipc, timeout: Duration, as_json: bool) -> Result<()> {
    let asked = ask_all(ipc, list_keepers(None)?, timeout);
    // Keepers that do not allow this user, and sockets without a process, are none for this user.
    let is_hidden =
        |error: &Error| error.kind() == ErrorKind::NotPermitted || matches!(error, Error::NoListener { .. });
    let shown: Vec<_> =
        asked.into_iter().filter(|(_, found)| !found.as_ref().is_err_and(is_hidden)).collect();
    if as_json {
        let keepers: Vec<Value> = shown.iter().map(|(keeper, found)| report(keeper, found)).collect();
        return output::json(&json!({ "keepers": keepers }));
    }
    if shown.is_empty() {
        return output::line(
            "no keeper of this user runs; start one with 'device-ipc keep FILES --name NAME'",
        );
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    table.set_header([
        "name", "user", "process", "version", "tensors", "bytes", "devices", "access", "readers",
    ]);
    for (keeper, found) in &shown {
        let first = [keeper.name.clone(), keeper.user.to_string()];
        table.add_row(first.into_iter().chain(row(found)));
    }
    output::line(table)
}

fn row(found: &Result<KeeperExport, Error>) -> Vec<String> {
    match found {
        Ok(kept) => {
            let descriptor = kept.descriptor();
            vec![
                format!("{} ({})", kept.process().pid, crate::transport::printable(kept.program())),
                kept.version().to_string(),
                descriptor.tensors().len().to_string(),
                HumanBytes(descriptor.len()).to_string(),
                format!("{} of {}", descriptor.homes().len(), descriptor.backend()),
                descriptor.access().to_string(),
                kept.readers().to_string(),
            ]
        }
        Err(error) => vec![crate::transport::printable(&error.to_string())],
    }
}

fn report(keeper: &KeeperName, found: &Result<KeeperExport, Error>) -> Value {
    let mut report = json!({ "name": keeper.name, "user": keeper.user });
    match found {
        Ok(kept) => {
            let descriptor = kept.descriptor();
            report["pid"] = json!(kept.process().pid);
            report["program"] = json!(kept.program());
            report["version"] = json!(kept.version());
            report["tensors"] = json!(descriptor.tensors().len());
            report["bytes"] = json!(descriptor.len());
            report["devices"] = json!(descriptor.homes().len());
            report["backend"] = json!(descriptor.backend());
            report["access"] = json!(descriptor.access().to_string());
            report["readers"] = json!(kept.readers());
        }
        Err(error) => report["error"] = json!(error.to_string()),
    }
    report
}
