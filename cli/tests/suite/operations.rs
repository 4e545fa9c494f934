//! Logs and metrics: the warnings about peers, and the page `docs/guide/operations.md`, which names every environment variable,
//! every target and every metric.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use crate::support::{Directory, Terminal, device_ipc, run, send_by_file, start};
use rustix::process::Signal;

const PAGE: &str = include_str!("../../../docs/guide/operations.md");

/// The folders with the sources of the published crates.
const SOURCES: [&str; 10] = [
    "src",
    "ipc-core/src",
    "backend-cuda/src",
    "backend-ascend/src",
    "backend-mock/src",
    "backend-mock/engine/src",
    "engine-nixl/src",
    "tcp/src",
    "cli/src",
    "python/python/device_ipc",
];

/// Starts a verbose sender, and waits for its file.
fn verbose_sender(directory: &Directory) -> (Terminal, String) {
    send_by_file(directory, &["--receivers", "0", "-v"])
}

/// Stops the sender and returns the lines of its log that contain this text.
fn log_of(sender: Terminal, text: &str) -> Vec<String> {
    sender.signal(Signal::TERM);
    let sent = sender.wait();
    assert!(sent.status.success(), "{sent:?}");
    sent.err.lines().filter(|line| line.contains(text)).map(str::to_owned).collect()
}

#[test]
fn killed_importer_is_a_warning_and_exited_importer_is_none() {
    let directory = Directory::new();
    let (mut sender, file) = verbose_sender(&directory);
    let mut killed = start(["recv", "--file", &file, "--hold", "60s"]);
    killed.until("holding it");
    let pid = killed.pid();
    killed.kill();
    let warning = sender.until("gone without notice");
    for text in [
        "WARN device_ipc::export",
        &format!("pid={pid}"),
        "program=\"device-ipc\"",
        "leases=1",
        "bytes=80",
        "exports=\"1\"",
    ] {
        assert!(warning.contains(text), "{text}: {warning}");
    }
    // This one exits while its import cache keeps a lease.
    run(["recv", "--file", &file]).good();
    let exited = sender.until("an importer has exited");
    assert!(exited.contains("INFO device_ipc::export") && exited.contains("leases=1"), "{exited}");
    // Other programs of the machine may connect, which is another warning.
    assert_eq!(log_of(sender, "gone without notice").len(), 1, "only the killed one");
}

#[test]
fn lost_exporter_is_a_warning() {
    let directory = Directory::new();
    let (sender, file) = verbose_sender(&directory);
    let mut receiver = start(["recv", "--file", &file, "--hold", "60s"]);
    receiver.until("holding it");
    let pid = sender.pid();
    sender.kill();
    let lost = receiver.wait();
    let warning = lost.err.lines().find(|line| line.contains("WARN device_ipc::import"));
    assert!(
        warning.is_some_and(|line| line.contains(&format!("pid={pid}")) && line.contains("leases=1")),
        "{lost:?}"
    );
    lost.bad();
}

#[test]
fn wrong_token_is_a_warning() {
    let directory = Directory::new();
    let (sender, file) = verbose_sender(&directory);
    let text = std::fs::read_to_string(&file).unwrap();
    let mut bytes =
        data_encoding::BASE64URL_NOPAD.decode(text.trim().trim_start_matches("dipc1:").as_bytes()).unwrap();
    // The token of the format in docs/spec/descriptor.md.
    let exporter = u32::from_le_bytes(bytes[16..20].try_into().unwrap()) as usize;
    bytes[20 + exporter + 16] ^= 1;
    let end = bytes.len() - 4;
    let checksum = crc32fast::hash(&bytes[..end]).to_le_bytes();
    bytes[end..].copy_from_slice(&checksum);
    let forged = format!("dipc1:{}", data_encoding::BASE64URL_NOPAD.encode(&bytes));
    for _ in 0..3 {
        let mut command = device_ipc();
        command.arg("recv").env("DEVICE_IPC_DESCRIPTOR", &forged);
        Terminal::start(command).wait().bad();
    }
    let refused = log_of(sender, "an open is refused");
    assert!(
        (1..=3).contains(&refused.len())
            && refused[0].contains("WrongToken")
            && refused[0].contains("count=1"),
        "{refused:?}"
    );
}

/// Returns the source files of the published packages with their texts, without the tests at the end of a file.
fn sources() -> Vec<(PathBuf, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut folders: Vec<PathBuf> = SOURCES.iter().map(|folder| root.join(folder)).collect();
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(&folder).expect("a folder of the checkout").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs" || extension == "py") {
                let text = std::fs::read_to_string(&path).expect("a file of the checkout");
                files.push((
                    path,
                    text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default().to_owned(),
                ));
            }
        }
    }
    files
}

/// Returns whether the checkout is here; a test executable may run on another machine.
fn has_checkout() -> bool {
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).exists();
    if !here {
        println!("skipped: the sources exist only where the tests were built");
    }
    here
}

/// Returns the words in backquotes of the first column of the tables of a section.
fn first_column(section: &str) -> BTreeSet<String> {
    let begin = PAGE.find(&format!("\n## {section}\n")).expect("the section exists") + 4;
    let text = PAGE[begin..].split("\n## ").next().unwrap_or_default();
    let cells = text.lines().filter_map(|line| line.strip_prefix("| `")?.split(" | ").next());
    cells
        .flat_map(|cell| {
            cell.split(['`', ',', ' ']).filter(|word| !word.is_empty()).map(str::to_owned).collect::<Vec<_>>()
        })
        .collect()
}

#[test]
fn page_names_every_environment_variable() {
    if !has_checkout() {
        return;
    }
    let mut read = BTreeSet::new();
    for (path, text) in sources() {
        for (position, _) in text.match_indices("\"DEVICE_IPC_") {
            let name = text[position + 1..].split('"').next().unwrap_or_default();
            let is_name = name.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
            if is_name && !path.ends_with("tests.rs") {
                read.insert(name.to_owned());
            }
        }
    }
    let listed: BTreeSet<_> = first_column("Environment variables")
        .into_iter()
        .filter(|name| name.starts_with("DEVICE_IPC_"))
        .collect();
    assert_eq!(listed, read);
}

#[test]
fn every_log_event_has_a_target_of_the_page() {
    if !has_checkout() {
        return;
    }
    let mut targets = BTreeSet::new();
    for (path, text) in sources() {
        for (position, _) in text.match_indices("tracing::") {
            let call = &text[position + "tracing::".len()..];
            let Some((level, arguments)) = call.split_once("!(") else { continue };
            if !["error", "warn", "info", "debug", "trace"].contains(&level) {
                continue;
            }
            let target = arguments.trim_start().strip_prefix("target: ");
            assert!(target.is_some(), "{}: tracing::{level}! has no target", path.display());
        }
        for (position, _) in text.match_indices("\"device_ipc::") {
            targets.insert(text[position + 1..].split('"').next().unwrap_or_default().to_owned());
        }
    }
    let listed: BTreeSet<_> =
        first_column("Logs").into_iter().filter(|name| name.starts_with("device_ipc::")).collect();
    assert_eq!(listed, targets);
}

/// The types of the metrics by name. Asserts the text format of Prometheus 0.0.4: HELP, TYPE and one sample for each.
fn parse(text: &str) -> BTreeMap<String, String> {
    let mut types = BTreeMap::new();
    let mut lines = text.lines();
    while let Some(help) = lines.next() {
        let (name, help) = help.strip_prefix("# HELP ").and_then(|line| line.split_once(' ')).expect("HELP");
        assert!(help.ends_with('.') && !help.contains('\\'), "{name}: {help:?}");
        let (typed, kind) =
            lines.next().and_then(|line| line.strip_prefix("# TYPE ")?.split_once(' ')).expect("TYPE");
        let (sampled, value) = lines.next().and_then(|line| line.split_once(' ')).expect("a sample");
        assert_eq!((typed, sampled), (name, name));
        assert!(value.parse::<u64>().is_ok(), "{name}: {value}");
        let valid = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
        assert!(name.starts_with("device_ipc_") && name.bytes().all(valid), "{name}");
        assert_eq!(kind == "counter", name.ends_with("_total"), "{name} is a {kind}");
        assert!(["counter", "gauge"].contains(&kind), "{name} is a {kind}");
        assert_eq!(help.contains("Bytes"), name.ends_with("_bytes"), "the unit of {name}: {help}");
        assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "{name} occurs twice");
    }
    types
}

#[test]
fn prometheus_text_has_names_with_units_and_the_page_names_them() {
    let text = device_ipc::counters().to_prometheus();
    assert!(text.ends_with('\n'), "{text:?}");
    let types = parse(&text);
    assert_eq!(first_column("Metrics"), types.keys().cloned().collect());
    for (name, kind) in &types {
        assert!(PAGE.contains(&format!("| `{name}` | {kind}")), "the page calls {name} no {kind}");
    }
}
