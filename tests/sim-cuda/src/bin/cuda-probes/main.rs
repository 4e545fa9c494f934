//! Prints what a CUDA driver does where the manual is silent, one line for each rule.
//!
//! ```text
//! cuda-probes [LIBRARY] [--only PART]     the library is libcuda.so.1 where none is named
//! ```
//!
//! Each probe runs in a separate process, because some probes corrupt it, and many start a second process. The
//! output has no addresses, times and process ids, so that `diff` compares the outputs of two drivers.

mod driver;
mod other;
mod probes;

use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

/// The time limit of a probe, after which it is killed.
const LIMIT: Duration = Duration::from_secs(60);

fn main() -> ExitCode {
    let mut library = PathBuf::from("libcuda.so.1");
    let mut only = String::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().unwrap_or_default();
        match argument.as_str() {
            "--only" => only = value(),
            "--list" => {
                probes::ALL.iter().for_each(|(name, _)| println!("{name}"));
                return ExitCode::SUCCESS;
            }
            "--probe" => {
                let name = value();
                return one(&name, Path::new(&value()));
            }
            "--other" => return code(other::serve(Path::new(&value()))),
            path => library = PathBuf::from(path),
        }
    }
    for (name, _) in probes::ALL.iter().filter(|(name, _)| name.contains(&only)) {
        println!("{name}: {}", run(name, &library));
    }
    ExitCode::SUCCESS
}

fn code(result: driver::R) -> ExitCode {
    if let Err(why) = &result {
        eprintln!("cuda-probes: {why}");
    }
    ExitCode::from(u8::from(result.is_err()))
}

/// Runs one probe in this process.
fn one(name: &str, library: &Path) -> ExitCode {
    let Some((_, probe)) = probes::ALL.iter().find(|(known, _)| *known == name) else {
        return code(Err(format!("no probe {name}")));
    };
    let outcome = driver::Driver::load(library)
        .and_then(|driver| probe(&probes::Probe { driver: &driver, library }))
        .unwrap_or_else(|status| status);
    println!("{outcome}");
    // Not by returning: streams may never complete.
    std::process::exit(0)
}

/// Runs one probe in a separate process, and returns its output or its termination.
fn run(name: &str, library: &Path) -> String {
    let own = std::env::current_exe().unwrap_or_else(|_| PathBuf::from("/proc/self/exe"));
    let mut command = Command::new(own);
    command.args(["--probe", name]).arg(library).stdin(Stdio::null()).stdout(Stdio::piped());
    let Ok(mut child) = command.spawn() else { return "cannot start a process".to_owned() };
    let end = Instant::now() + LIMIT;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < end => std::thread::sleep(Duration::from_millis(2)),
            _ => {
                let _ = child.kill();
                let _ = child.wait();
                return "does not end".to_owned();
            }
        }
    };
    let mut text = String::new();
    if let Some(mut output) = child.stdout.take() {
        let _ = output.read_to_string(&mut text);
    }
    match status.signal() {
        Some(_) => "the process crashes".to_owned(),
        None => text.trim().to_owned(),
    }
}
