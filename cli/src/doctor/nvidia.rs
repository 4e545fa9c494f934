//! Checks of NVIDIA: the kernel driver, the nodes in `/dev`, MIG, MPS and IMEX channels.

use super::facts::Facts;
use super::finding::Finding;
use super::libraries::Library;

const VERSION: &str = super::facts::NVIDIA_VERSION;

pub(super) fn check(facts: &Facts) -> Vec<Finding> {
    if facts.exists("/dev/dxg") {
        return vec![Finding::warning(
            "NVIDIA driver",
            "this is WSL, on which device-ipc has not been tested",
            "see the round trips below, or use native Linux",
        )];
    }
    if !facts.has_nvidia_driver() {
        return vec![Finding::ok("NVIDIA driver", format!("not installed ({VERSION} does not exist)"))];
    }
    vec![driver(facts), nodes(facts), multi_instance(facts), fabric_channels(facts)]
}

fn driver(facts: &Facts) -> Finding {
    let check = "NVIDIA driver";
    let Some(text) = facts.text(VERSION) else {
        let change = "modprobe nvidia on the host; in a container, start it with --gpus all";
        return Finding::warning(check, format!("cannot read {VERSION}"), change);
    };
    match version(&text) {
        Some((major, whole)) if major < 470 => Finding::problem(
            check,
            format!("kernel driver {whole}"),
            "install version 470 (CUDA 11.4) or newer",
        ),
        Some((_, whole)) => Finding::ok(check, format!("kernel driver {whole}")),
        None => Finding::ok(check, format!("unknown version: {}", text.lines().next().unwrap_or_default())),
    }
}

/// Returns the first word that has the form of a version, such as `580.159.04`.
fn version(text: &str) -> Option<(u32, &str)> {
    text.lines().next()?.split_whitespace().find_map(|word| {
        let (major, rest) = word.split_once('.')?;
        let numbers = !rest.is_empty() && rest.chars().all(|c| c.is_ascii_digit() || c == '.');
        Some((major.parse().ok().filter(|_| numbers)?, word))
    })
}

fn nodes(facts: &Facts) -> Finding {
    let check = "NVIDIA devices";
    let names = facts.names("/dev");
    let cards = names.iter().filter(|name| {
        name.strip_prefix("nvidia")
            .is_some_and(|rest| !rest.is_empty() && rest.bytes().all(|b| b.is_ascii_digit()))
    });
    let cards = cards.count();
    if !names.iter().any(|name| name == "nvidiactl") || cards == 0 {
        return Finding::problem(
            check,
            "not found: /dev/nvidiactl or /dev/nvidia0, although the kernel driver is loaded",
            "start the container with --gpus all (nvidia-container-toolkit); on the host: nvidia-smi",
        );
    }
    if !names.iter().any(|name| name == "nvidia-uvm") {
        return Finding::problem(
            check,
            "not found: /dev/nvidia-uvm, which CUDA requires",
            "run nvidia-modprobe -u -c=0 on the host, then restart the container",
        );
    }
    Finding::ok(check, format!("{cards} in /dev"))
}

/// Checks for GPU instances, which have directories below the capabilities of their card.
fn multi_instance(facts: &Facts) -> Finding {
    let check = "MIG and compute mode";
    let capabilities = "/proc/driver/nvidia/capabilities";
    let divided: Vec<String> = facts
        .names(capabilities)
        .into_iter()
        .filter(|gpu| {
            facts.names(&format!("{capabilities}/{gpu}/mig")).iter().any(|name| name.starts_with("gi"))
        })
        .collect();
    let hidden = facts.variable("CUDA_VISIBLE_DEVICES").is_some_and(|value| value.contains("MIG-"));
    if divided.is_empty() && !hidden {
        return Finding::ok(
            check,
            "MIG is disabled; the compute mode cannot be read from a file, but if it is exclusive, the round trips below fail",
        );
    }
    Finding::warning(
        check,
        format!(
            "MIG is enabled ({}), and GPU instances cannot share memory with each other",
            divided.join(", ")
        ),
        "use the same instance in sender and receivers (CUDA_VISIBLE_DEVICES=MIG-…), or disable MIG: nvidia-smi -mig 0",
    )
}

/// Checks whether processes share the contexts of devices through MPS. `None` if the library has no device.
pub(super) fn mps(library: &Library) -> Option<Finding> {
    let check = "MPS";
    let devices: Vec<String> =
        library.available()?.without_fault_isolation.iter().map(u32::to_string).collect();
    if devices.is_empty() {
        return Some(Finding::ok(
            check,
            "not in use: a kernel that writes to a read-only mapping ends its own process's use of the device only",
        ));
    }
    Some(Finding::warning(
        check,
        format!(
            "in use on device {} (or not reported, by a driver before CUDA 12.1): a kernel that writes to a read-only mapping, or \
             a process that is killed while its kernels run, ends the use of the device for all processes of the MPS server",
            devices.join(", ")
        ),
        "to isolate the processes, run them without the control daemon: echo quit | nvidia-cuda-mps-control",
    ))
}

fn fabric_channels(facts: &Facts) -> Finding {
    let check = "IMEX channels";
    let channels = facts.names("/dev/nvidia-caps-imex-channels");
    if channels.is_empty() {
        return Finding::ok(
            check,
            "none: memory that has only fabric handles cannot be shared, all other memory can (on a node with IMEX, \
             nvidia-modprobe -i 0:1 creates a channel)",
        );
    }
    Finding::ok(check, format!("{}: memory with fabric handles can be shared", channels.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::super::facts::tests::Machine;
    use super::super::finding::Verdict;
    use super::super::libraries::tests::with_peers;
    use super::*;

    fn with_driver(version: &str) -> Machine {
        let text = format!(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\nGCC 12\n"
        );
        Machine::new().with(VERSION, &text)
    }

    fn with_cards() -> Machine {
        with_driver("580.159.04").with("/dev/nvidiactl", "").with("/dev/nvidia0", "").with("/dev/nvidia1", "")
    }

    #[test]
    fn driver_version_determines_the_verdict() {
        assert_eq!(check(&Machine::new().facts).len(), 1);
        let old = driver(&with_driver("460.32.03").facts);
        assert!(old.verdict == Verdict::Problem && old.found.contains("460.32.03"), "{old}");
        let good = driver(&with_driver("580.159.04").facts);
        assert!(good.verdict == Verdict::Ok && good.found.contains("580.159.04"), "{good}");
        assert_eq!(driver(&Machine::new().facts).verdict, Verdict::Warning);
        let wsl = check(&Machine::new().with("/dev/dxg", "").facts);
        assert_eq!(wsl[0].verdict, Verdict::Warning);
    }

    #[test]
    fn missing_device_nodes_are_named() {
        let none = nodes(&with_driver("580.1").facts);
        assert!(none.verdict == Verdict::Problem && none.change.unwrap().contains("--gpus all"));
        let half = nodes(&with_cards().facts);
        assert!(half.verdict == Verdict::Problem && half.found.contains("nvidia-uvm"), "{half}");
        let whole = nodes(&with_cards().with("/dev/nvidia-uvm", "").with("/dev/nvidia-uvm-tools", "").facts);
        assert_eq!((whole.verdict, whole.found.as_str()), (Verdict::Ok, "2 in /dev"));
    }

    #[test]
    fn mig_instances_are_a_warning() {
        let capabilities = "/proc/driver/nvidia/capabilities";
        let machine = with_cards().with(&format!("{capabilities}/gpu0/mig/access"), "");
        assert_eq!(multi_instance(&machine.facts).verdict, Verdict::Ok);
        let divided = machine.with(&format!("{capabilities}/gpu0/mig/gi1/access"), "");
        let finding = multi_instance(&divided.facts);
        assert!(finding.verdict == Verdict::Warning && finding.found.contains("gpu0"), "{finding}");
        let hidden = with_cards().with_variable("CUDA_VISIBLE_DEVICES", "MIG-1234");
        assert_eq!(multi_instance(&hidden.facts).verdict, Verdict::Warning);
    }

    #[test]
    fn devices_behind_mps_are_a_warning() {
        let mut library = with_peers("cuda", vec![vec![true]]);
        assert_eq!(mps(&library).unwrap().verdict, Verdict::Ok);
        library.state.as_mut().unwrap_or_else(|_| unreachable!()).without_fault_isolation = vec![0, 2];
        let finding = mps(&library).unwrap();
        assert!(finding.verdict == Verdict::Warning && finding.found.contains("device 0, 2"), "{finding}");
    }

    #[test]
    fn fabric_channels_are_listed() {
        assert!(fabric_channels(&with_cards().facts).found.starts_with("none"));
        let machine = with_cards().with("/dev/nvidia-caps-imex-channels/channel0", "");
        assert!(fabric_channels(&machine.facts).found.starts_with("channel0"));
    }
}
