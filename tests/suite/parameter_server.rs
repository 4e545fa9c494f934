//! A parameter server: one process publishes versions of a tensor, several workers read each of them. A worker that is killed
//! or stopped does not keep the server from publishing the next version and freeing the last.
//!
//! It runs on the mock and on both simulated drivers, and with `DEVICE_IPC_BACKEND` on the backend of that name alone, for example
//! on a GPU:
//!
//! ```text
//! DEVICE_IPC_BACKEND=cuda cargo test -p device-ipc parameter_server
//! ```

use std::ffi::OsString;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::roles::{role as role_name, start_with};
use device_ipc::{Descriptor, Dtype, Error, Export, Ipc, Result};
use device_ipc_test_process::Process;

const ELEMENTS: usize = 4096;
const VERSIONS: u64 = 5;

/// Far less than the server's timeout: no worker is waited for.
const AT_ONCE: Duration = Duration::from_secs(10);

#[test]
fn killed_and_stopped_workers_block_no_version() {
    if std::env::var_os("DEVICE_IPC_BACKEND").is_some() {
        return run(&[]);
    }
    let path = |library: std::io::Result<std::path::PathBuf>| {
        library.expect("the simulator is built with the tests").into_os_string()
    };
    let (cuda, ascend) = (path(device_ipc_sim_cuda::library()), path(device_ipc_sim_ascendcl::library()));
    run(&[("DEVICE_IPC_BACKEND", "mock".into())]);
    run(&[("DEVICE_IPC_BACKEND", "cuda".into()), (device_ipc::cuda::LIBRARY_VARIABLE, cuda)]);
    run(&[("DEVICE_IPC_BACKEND", "ascend".into()), (device_ipc::ascend::LIBRARY_VARIABLE, ascend)]);
}

/// Runs the processes with these environment variables.
fn run(environment: &[(&str, OsString)]) {
    let process = |role| start_with(module_path!(), role, environment);
    let mut server = process("server");
    let [mut reader, mut stopped] = [(); 2].map(|()| process("reader"));
    let [mut holder, mut killed] = [(); 2].map(|()| process("holder"));
    let version = |server: &mut Process| {
        server.send("next");
        server.line(|line| line.starts_with("dipc").then(|| line.to_owned()))
    };
    let first = version(&mut server);
    for worker in [&mut reader, &mut stopped, &mut holder, &mut killed] {
        worker.send(&first);
        worker.line(|line| (line == "1").then_some(()));
    }
    stopped.suspend();
    killed.kill();
    for number in 2..=VERSIONS {
        let descriptor = version(&mut server);
        // The worker that holds the last version learns of the new one, and releases the last.
        holder.line(|line| (line == "dropped").then_some(()));
        let took: u64 = server.line(|line| line.strip_prefix("closed ")?.parse().ok());
        assert!(Duration::from_millis(took) < AT_ONCE, "version {number}: {took} ms");
        for worker in [&mut reader, &mut holder] {
            worker.send(&descriptor);
            worker.line(|line| (line == number.to_string()).then_some(()));
        }
        if number == VERSIONS {
            stopped.resume();
            stopped.send(&first);
            stopped.line(|line| (line == "stale").then_some(()));
            stopped.send(&descriptor);
            stopped.line(|line| (line == number.to_string()).then_some(()));
        }
    }
    // The end of the server drops the last version.
    for worker in [reader, stopped] {
        worker.finish();
    }
    server.finish();
    holder.line(|line| (line == "dropped" || line == "gone").then_some(()));
    holder.finish();
}

#[test]
#[ignore = "what the other tests start"]
fn role() {
    match role_name().as_str() {
        "server" => server(),
        "reader" => reader(),
        "holder" => holder(),
        other => panic!("there is no role {other}"),
    }
    .expect("no call fails");
}

fn ipc() -> Result<Ipc> {
    Ipc::builder().allow_simulated(true).auto()
}

fn lines() -> impl Iterator<Item = String> {
    std::io::stdin().lines().map_while(|line| line.ok())
}

/// Publishes a version for each line of its input, then frees the one before.
fn server() -> Result<()> {
    let ipc = ipc()?;
    let stream = ipc.create_stream(0)?;
    let mut current: Option<Export> = None;
    for (_, number) in lines().zip(1_u64..) {
        let weights = ipc.allocate(0, (ELEMENTS * size_of::<f32>()) as u64)?;
        weights.view_mut::<f32, _>(&stream)?.copy_from(&[number as f32; ELEMENTS])?;
        let share = ipc.share(weights).dtype(Dtype::F32).shape([ELEMENTS as u64]).ready_on(&stream);
        let next = share.start()?;
        println!("{}", next.descriptor());
        if let Some(last) = current.replace(next) {
            let began = Instant::now();
            match last.close(Duration::from_secs(60)) {
                Ok(()) => println!("closed {}", began.elapsed().as_millis()),
                // The export comes back, so that the server can list the holders and continue.
                Err(failed) => println!("{}", failed.into_inner().holders()),
            }
        }
    }
    Ok(())
}

/// Reads each version and releases it.
fn reader() -> Result<()> {
    let ipc = ipc()?;
    let stream = ipc.create_stream(0)?;
    for line in lines() {
        let descriptor: Descriptor = line.parse()?;
        match ipc.open(&descriptor).on(&stream) {
            Ok(weights) => {
                let values = weights.view::<f32, _>(&stream)?.to_vec()?;
                assert!(values.iter().all(|value| *value == values[0]), "of one version");
                weights.release(&stream)?;
                wait_until_idle();
                println!("{}", values[0]);
            }
            Err(Error::ExportDropped { .. }) => println!("stale"),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Waits until the stream has reached the release, so that the lease is idle.
fn wait_until_idle() {
    let end = Instant::now() + AT_ONCE;
    while device_ipc::counters().imports_idle == 0 {
        assert!(Instant::now() < end, "the lease does not become idle");
        std::thread::yield_now();
    }
}

/// Holds each version until the server drops it.
fn holder() -> Result<()> {
    let ipc = ipc()?;
    let stream = ipc.create_stream(0)?;
    let (sender, ended) = channel();
    for line in lines() {
        let weights = ipc.open(&line.parse()?).on(&stream)?;
        let (ends, gone) = (sender.clone(), sender.clone());
        weights.on_dropped(move || ends.send("dropped").unwrap_or_default());
        weights.on_gone(move |_| gone.send("gone").unwrap_or_default());
        println!("{}", weights.view::<f32, _>(&stream)?.to_vec()?[0]);
        let end = ended.recv().expect("this thread has a sender");
        weights.release(&stream)?;
        println!("{end}");
    }
    Ok(())
}
