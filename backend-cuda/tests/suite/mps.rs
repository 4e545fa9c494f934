//! Sharing through MPS on a real GPU, with a control daemon of the test's own. Without a GPU, or without
//! `nvidia-cuda-mps-control`, the test reports it and passes.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::gpu::backend;
use device_ipc_core::backend::{DeviceIpc, TestKernels};
use device_ipc_core::{Access, Descriptor, DeviceOrdinal, Error, Export, Ipc, Mapping};
use device_ipc_cuda::{CudaBackend, VIRTUAL_MEMORY};
use device_ipc_test_process::{Process, serve};

const ZERO: DeviceOrdinal = DeviceOrdinal::new(0);
const CONTROL: &str = "nvidia-cuda-mps-control";
const SOON: Duration = Duration::from_secs(60);
const BYTES: u64 = 2 << 20;

/// A control daemon with directories of its own, which affects no other process of the machine. Dropping it stops it.
struct Daemon {
    directory: PathBuf,
}

impl Daemon {
    /// Starts the daemon; `None` if the machine does not have it.
    fn start() -> Option<Self> {
        let directory = std::env::temp_dir().join(format!("device-ipc-mps-{}", std::process::id()));
        let daemon = Self { directory };
        for directory in [daemon.pipes(), daemon.logs()] {
            std::fs::create_dir_all(directory).unwrap();
        }
        let mut child = match daemon.command().arg("-d").stdin(Stdio::null()).spawn() {
            Ok(child) => child,
            Err(error) => {
                eprintln!("skipped: {CONTROL} does not start: {error}");
                return None;
            }
        };
        // It returns when the daemon accepts clients.
        assert!(exits(&mut child), "{CONTROL} -d did not return in time");
        Some(daemon)
    }

    fn pipes(&self) -> PathBuf {
        self.directory.join("pipes")
    }

    fn logs(&self) -> PathBuf {
        self.directory.join("logs")
    }

    fn variables(&self) -> [(&'static str, PathBuf); 2] {
        [("CUDA_MPS_PIPE_DIRECTORY", self.pipes()), ("CUDA_MPS_LOG_DIRECTORY", self.logs())]
    }

    fn command(&self) -> Command {
        let mut command = Command::new(CONTROL);
        command.envs(self.variables());
        command
    }

    /// Starts a process that uses the device through this daemon.
    fn process(&self) -> Process {
        let variables = self.variables().map(|(name, path)| (name, path.to_str().unwrap().to_owned()));
        let variables: Vec<_> = variables.iter().map(|(name, path)| (*name, path.as_str())).collect();
        Process::of_test(concat!(module_path!(), "::the_process"), &variables)
    }

    /// Returns the daemon's process id, as long as it runs.
    fn pid_file(&self) -> PathBuf {
        self.pipes().join(format!("{CONTROL}.pid"))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let stopped = self.command().stdin(Stdio::piped()).spawn().is_ok_and(|mut child| {
            // Clients have exited; those of a failed test are given a second.
            let told = child.stdin.take().is_some_and(|mut input| input.write_all(b"quit -t 1\n").is_ok());
            exits(&mut child) && told
        });
        let begin = Instant::now();
        while stopped && self.pid_file().exists() && begin.elapsed() < SOON {
            std::thread::sleep(Duration::from_millis(20));
        }
        if let Ok(pid) = std::fs::read_to_string(self.pid_file()) {
            eprintln!("{CONTROL} did not stop, and is killed");
            let _ = Command::new("kill").args(["-KILL", pid.trim()]).status();
        }
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Waits until a child exits, or kills it. Returns whether it succeeded.
fn exits(child: &mut Child) -> bool {
    let begin = Instant::now();
    while begin.elapsed() < SOON {
        if let Some(status) = child.try_wait().unwrap() {
            return status.success();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    let _ = child.kill();
    let _ = child.wait();
    false
}

#[test]
fn sharing_through_mps_works_without_fault_isolation() {
    let Some((backend, _alone)) = backend() else { return };
    assert!(backend.capabilities(ZERO).unwrap().fault_isolation, "this process does not use MPS");
    let Some(daemon) = Daemon::start() else { return };

    let (mut exporter, mut importer, mut writer) = (daemon.process(), daemon.process(), daemon.process());
    assert_eq!(exporter.ask("isolation"), "false");
    let descriptor = exporter.ask("share");
    for process in [&mut importer, &mut writer] {
        assert_eq!(process.ask(&format!("open {descriptor}")), "7");
        assert_eq!(process.ask(&format!("open-writable {descriptor}")), "AccessDenied");
    }
    let failed = writer.ask("add");
    assert!(failed.contains("CUDA_ERROR"), "the kernel's write is refused: {failed}");
    for (name, process) in [("exporter", &mut exporter), ("importer", &mut importer)] {
        let begin = Instant::now();
        // The server reports the fault to each client by itself.
        while !process.ask("use").starts_with("error: ") {
            assert!(begin.elapsed() < SOON, "MPS isolates the {name}, against the documentation");
        }
    }

    // The server accepts clients again when the former ones have exited.
    exporter.kill();
    importer.kill();
    writer.kill();
    let begin = Instant::now();
    let (mut exporter, descriptor) = loop {
        let mut exporter = daemon.process();
        let answer = exporter.ask("share");
        if !answer.starts_with("error: ") {
            break (exporter, answer);
        }
        assert!(begin.elapsed() < SOON, "{answer}");
    };
    let mut importer = daemon.process();
    assert_eq!(importer.ask(&format!("open {descriptor}")), "7");
    assert_eq!(importer.ask("release"), "released");
    assert_eq!(exporter.ask("released"), "released");
    importer.finish();
    exporter.finish();
    let pid_file = daemon.pid_file();
    assert!(pid_file.exists(), "the daemon runs");
    drop(daemon);
    assert!(!Path::new(&pid_file).exists(), "the daemon has stopped");
}

/// The state of a process of the test.
#[derive(Default)]
struct State {
    backend: Option<Arc<CudaBackend>>,
    export: Option<Export>,
    mapping: Option<Mapping>,
}

type Answer = Result<String, Box<dyn std::error::Error>>;

impl State {
    fn backend(&mut self) -> Result<Arc<CudaBackend>, Box<dyn std::error::Error>> {
        if self.backend.is_none() {
            self.backend = Some(CudaBackend::load()?);
        }
        Ok(Arc::clone(self.backend.as_ref().ok_or("no backend")?))
    }

    fn answer(&mut self, request: &str, argument: &str) -> Answer {
        let backend = self.backend()?;
        let ipc = Ipc::with_backend(backend.clone());
        let stream = || backend.memory().create_stream(ZERO);
        Ok(match request {
            "isolation" => backend.capabilities(ZERO)?.fault_isolation.to_string(),
            "share" => {
                let buffer = ipc.allocate_for(0, BYTES, VIRTUAL_MEMORY)?;
                let stream = ipc.create_stream(0)?;
                buffer.view_mut::<u8, _>(&stream)?.fill_bytes(7)?;
                stream.synchronize()?;
                let export = ipc.share(buffer).access(Access::ReadOnly).start();
                let export = self.export.insert(export.map_err(|error| error.to_string())?);
                export.descriptor().to_string()
            }
            "open" => {
                let descriptor: Descriptor = argument.parse()?;
                let mapping = self.mapping.insert(ipc.open(&descriptor).at_home()?);
                mapping.to_host::<u8, _>(&ipc.create_stream(0)?)?[0].to_string()
            }
            "open-writable" => {
                let descriptor: Descriptor = argument.parse()?;
                match ipc.open(&descriptor).access(Access::ReadWrite).at_home() {
                    Err(Error::AccessDenied { .. }) => "AccessDenied".into(),
                    other => format!("{other:?}"),
                }
            }
            "add" => {
                let range = self.mapping.as_ref().ok_or("not open")?.range();
                let stream = stream()?;
                // SAFETY: the mapping is open; the hardware refuses the write, after which this process uses no device.
                unsafe { backend.add_f32(range, 1.0, stream.as_borrowed())? };
                backend.memory().synchronize(stream.as_borrowed())?;
                "added".into()
            }
            "use" => {
                backend.memory().synchronize(stream()?.as_borrowed())?;
                drop(ipc.allocate(0, BYTES)?);
                "used".into()
            }
            "release" => {
                self.mapping = None;
                device_ipc_core::close_unused(SOON)?;
                "released".into()
            }
            "released" => {
                self.export.take().ok_or("not shared")?.wait_released(SOON)?;
                "released".into()
            }
            other => return Err(format!("an unknown request: {other}").into()),
        })
    }
}

#[test]
#[ignore = "a process of the test above"]
fn the_process() {
    let mut state = State::default();
    serve(|request, argument| {
        state.answer(request, argument).unwrap_or_else(|error| format!("error: {error}"))
    });
}
