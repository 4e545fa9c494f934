//! Two terminals on CUDA: on the simulator of its driver, and on GPUs where there are some.

mod support;

use std::process::Command;

use device_ipc_sim_cuda::{VARIABLE, install};
use serde_json::Value;
use support::{Folder, Terminal, device_ipc};

/// Makes commands that find a driver.
struct Machine {
    folder: Folder,
    simulated: Option<&'static str>,
}

impl Machine {
    /// The simulator; where the tests were not built, there is none.
    fn simulated(machine: &'static str) -> Option<Self> {
        let folder = Folder::new();
        let driver = folder.path("driver");
        std::fs::create_dir(&driver).expect("a folder");
        if let Err(error) = install(&driver) {
            eprintln!("skipped: the simulator of CUDA is where the tests were built ({error})");
            return None;
        }
        Some(Self { folder, simulated: Some(machine) })
    }

    /// GPUs.
    fn real() -> Option<Self> {
        match device_ipc::Ipc::named("cuda") {
            Ok(_) => Some(Self { folder: Folder::new(), simulated: None }),
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
            let driver = self.folder.path("driver");
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
        self.start(arguments).end().good()
    }
}

/// A tensor goes there and back by a file, with a kernel and through the host, and by TCP.
fn terminals(machine: &Machine, device: &str) {
    let (file, key) = (machine.folder.text("w.ipc"), machine.folder.key("key", "a key that nobody guesses"));
    let mut sender = machine.start(&["send", "--backend", "cuda", "--file", &file, "--receivers", "2"]);
    sender.until("wrote");
    let received = machine.run(&["recv", "--file", &file, "--device", device, "--add", "1"]);
    assert!(received.contains(&format!("device=cuda:{device}")), "{received}");
    assert!(received.contains("added 1 on the device, mean=2.000000"), "{received}");
    assert!(machine.run(&["attach", &format!("@{file}"), "add", "3"]).contains("mean=5.000000"));
    assert!(sender.end().good().contains("mean delta=4.000000"));

    let arguments = ["--backend", "cuda", "--dtype", "uint8", "--shape", "1024", "--key-file", &key];
    let mut sender = machine.start(&[&["send", "--listen", "127.0.0.1:0"], &arguments[..]].concat());
    let line = sender.until("listening at");
    let address = line.rsplit(' ').next().expect("an address");
    let receive = ["recv", "--connect", address, "--key-file", &key, "--device", device, "--add", "255"];
    assert!(machine.run(&receive).contains("added 255 through the host, mean=0.000000"));
    assert!(sender.end().good().contains("mean delta=-1.000000"));
}

#[test]
fn a_tensor_goes_to_another_terminal_on_the_same_card_and_on_another() {
    let Some(machine) = Machine::simulated("devices=2") else { return };
    terminals(&machine, "0");
    terminals(&machine, "1");
}

#[test]
fn cards_that_do_not_reach_each_other_are_an_error_that_names_them() {
    let Some(machine) = Machine::simulated("devices=2;peers=none") else { return };
    let file = machine.folder.text("w.ipc");
    let mut sender = machine.start(&["send", "--backend", "cuda", "--file", &file]);
    sender.until("wrote");
    let error = machine.start(&["recv", "--file", &file, "--device", "1"]).end().bad();
    assert!(error.contains("no peer access between them"), "{error}");
    machine.run(&["recv", "--file", &file, "--device", "0"]);
    sender.end().good();
}

#[test]
fn the_doctor_tries_every_card_and_says_what_the_driver_refuses() {
    let Some(machine) = Machine::simulated("devices=2") else { return };
    let report: Value =
        serde_json::from_str(&machine.run(&["doctor", "--json", "--backend", "cuda"])).unwrap();
    let trips = report["checks"].as_array().unwrap().iter().filter(|one| one["check"] == "round trip");
    assert_eq!(trips.clone().count(), 4, "{report}");
    assert!(trips.into_iter().all(|trip| trip["verdict"] == "ok"), "{report}");

    let Some(machine) = Machine::simulated("devices=1;fault=cuIpcGetMemHandle:1:999") else { return };
    let ended = machine.start(&["doctor", "--backend", "cuda"]).end();
    assert!(ended.status.code() == Some(1) && ended.out.contains("999"), "{ended:?}");
}

#[test]
fn on_gpus_a_tensor_goes_to_another_terminal() {
    let Some(machine) = Machine::real() else { return };
    terminals(&machine, "0");
    let devices = device_ipc::Ipc::named("cuda").and_then(|ipc| ipc.devices().map(<[_]>::len));
    if devices.is_ok_and(|count| count > 1) {
        terminals(&machine, "1");
    }
    let report = machine.run(&["doctor", "--backend", "cuda"]);
    assert!(report.contains("ok       round trip: cuda: device 0 to device 0"), "{report}");
}
