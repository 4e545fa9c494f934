//! `send` and `recv` on CUDA: on the simulator of the driver, and on GPUs if the machine has some.

use std::process::Command;

use crate::support::{Directory, Terminal, device_ipc};
use device_ipc_sim_cuda::{VARIABLE, install};
use serde_json::Value;

/// A machine with a CUDA driver, and commands that run on it.
struct Machine {
    directory: Directory,
    simulated: Option<&'static str>,
}

impl Machine {
    /// The simulator; `None` where the tests were not built, because it is missing there.
    fn simulated(machine: &'static str) -> Option<Self> {
        let directory = Directory::new();
        let driver = directory.path("driver");
        std::fs::create_dir(&driver).expect("a directory");
        if let Err(error) = install(&driver) {
            eprintln!("skipped: the simulator of CUDA exists only where the tests were built ({error})");
            return None;
        }
        Some(Self { directory, simulated: Some(machine) })
    }

    /// The GPUs of this machine; `None` without GPUs.
    fn real() -> Option<Self> {
        match device_ipc::Ipc::named("cuda") {
            Ok(_) => Some(Self { directory: Directory::new(), simulated: None }),
            Err(error) => {
                eprintln!("skipped: {error}");
                None
            }
        }
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = device_ipc();
        command.args(arguments).env_remove("DEVICE_IPC_BACKEND");
        if let Some(machine) = self.simulated {
            let driver = self.directory.path("driver");
            command
                .env("LD_LIBRARY_PATH", &driver)
                .env("DEVICE_IPC_CUDA_LIBRARY", driver.join("libcuda.so.1"))
                .env("DEVICE_IPC_ASCEND_LIBRARY", "/nowhere/libascendcl.so")
                .env(VARIABLE, machine)
                .env_remove("CUDA_VISIBLE_DEVICES");
        }
        command
    }

    fn start(&self, arguments: &[&str]) -> Terminal {
        Terminal::start(self.command(arguments))
    }

    fn run(&self, arguments: &[&str]) -> String {
        self.start(arguments).wait().good()
    }
}

/// Shares tensors by a file, and modifies them by a kernel and through host memory.
fn terminals(machine: &Machine, device: &str) {
    let file = machine.directory.text("w.ipc");
    let mut sender = machine.start(&["send", "--backend", "cuda", "--file", &file, "--receivers", "2"]);
    sender.until("wrote");
    let received = machine.run(&["recv", "--file", &file, "--device", device, "--add", "1"]);
    assert!(received.contains(&format!("device=cuda:{device}")), "{received}");
    assert!(received.contains("added 1 on the device, mean=2.000000"), "{received}");
    assert!(machine.run(&["attach", &format!("@{file}"), "add", "3"]).contains("mean=5.000000"));
    assert!(sender.wait().good().contains("mean delta=4.000000"));

    let arguments = ["--backend", "cuda", "--dtype", "uint8", "--shape", "1024"];
    let mut sender = machine.start(&[&["send", "--file", &file], &arguments[..]].concat());
    sender.until("wrote");
    let receive = ["recv", "--file", &file, "--device", device, "--add", "255"];
    assert!(machine.run(&receive).contains("added 255 through the host, mean=0.000000"));
    assert!(sender.wait().good().contains("mean delta=-1.000000"));
}

#[test]
fn tensor_is_shared_on_same_and_other_card() {
    let Some(machine) = Machine::simulated("devices=2") else { return };
    terminals(&machine, "0");
    terminals(&machine, "1");
}

#[test]
fn missing_peer_access_is_an_error() {
    let Some(machine) = Machine::simulated("devices=2;peers=none") else { return };
    let file = machine.directory.text("w.ipc");
    let mut sender = machine.start(&["send", "--backend", "cuda", "--file", &file]);
    sender.until("wrote");
    let error = machine.start(&["recv", "--file", &file, "--device", "1"]).wait().bad();
    assert!(error.contains("no peer access; open it"), "{error}");
    machine.run(&["recv", "--file", &file, "--device", "0"]);
    sender.wait().good();
}

#[test]
fn doctor_tests_every_card_and_reports_driver_errors() {
    let Some(machine) = Machine::simulated("devices=2") else { return };
    let report: Value =
        serde_json::from_str(&machine.run(&["doctor", "--json", "--backend", "cuda"])).unwrap();
    let trips = report["checks"].as_array().unwrap().iter().filter(|one| one["check"] == "round trip");
    assert_eq!(trips.clone().count(), 4, "{report}");
    assert!(trips.into_iter().all(|trip| trip["verdict"] == "ok"), "{report}");

    // Each default kind of memory fails: that of the initial pid namespace, and that of others.
    let broken = "devices=1;fault=cuIpcGetMemHandle:1:999,cuMemExportToShareableHandle:1:999";
    let Some(machine) = Machine::simulated(broken) else { return };
    let result = machine.start(&["doctor", "--backend", "cuda"]).wait();
    assert!(result.status.code() == Some(1) && result.out.contains("999"), "{result:?}");
}

#[test]
fn use_through_mps_is_reported_once_for_each_process() {
    let verdict = |machine: &'static str| {
        let machine = Machine::simulated(machine)?;
        let report = machine.run(&["doctor", "--json", "--backend", "cuda", "--quick"]);
        let report: Value = serde_json::from_str(&report).unwrap();
        let mps = report["checks"].as_array().unwrap().iter().find(|one| one["check"] == "MPS");
        Some(mps.expect("it was checked")["verdict"].as_str().expect("a text").to_owned())
    };
    let Some(without) = verdict("devices=2") else { return };
    assert_eq!(without, "ok");
    assert_eq!(verdict("devices=2;mps").as_deref(), Some("warning"));
    assert_eq!(
        verdict("devices=1;driver=12000").as_deref(),
        Some("warning"),
        "a driver that does not report it"
    );

    for (description, expected) in [("devices=2;mps", 1), ("devices=2", 0)] {
        let Some(machine) = Machine::simulated(description) else { return };
        let file = machine.directory.text("w.ipc");
        let mut sender = machine.start(&["send", "--backend", "cuda", "--file", &file, "--receivers", "2"]);
        sender.until("wrote");
        for device in ["0", "1"] {
            let received = machine.start(&["recv", "--file", &file, "--device", device, "--add", "1"]).wait();
            assert_eq!(received.err.matches("used through MPS").count(), expected, "{received:?}");
        }
        let sent = sender.wait();
        assert!(sent.status.success(), "{sent:?}");
        assert_eq!(sent.err.matches("used through MPS").count(), expected, "{sent:?}");
        let listed = machine.start(&["devices"]).wait();
        assert!(!listed.err.contains("MPS"), "a listing uses no device: {listed:?}");
    }
}

#[test]
fn tensor_is_shared_between_terminals_on_gpus() {
    let Some(machine) = Machine::real() else { return };
    terminals(&machine, "0");
    let devices = device_ipc::Ipc::named("cuda").and_then(|ipc| ipc.devices().map(<[_]>::len));
    if devices.is_ok_and(|count| count > 1) {
        terminals(&machine, "1");
    }
    let report = machine.run(&["doctor", "--backend", "cuda"]);
    assert!(report.contains("ok       round trip: cuda: device 0 to device 0"), "{report}");
}
