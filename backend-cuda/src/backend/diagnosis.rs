//! Checks of NVIDIA for `device-ipc doctor`: the kernel driver, the nodes in `/dev`, MIG, MPS, IMEX channels, `/dev/shm`, and the
//! variables that hide devices.

use device_ipc_core::backend::{DeviceIpc, Diagnosis, Finding, Machine, Symptom};

/// The file that contains the version of the kernel driver.
const VERSION: &str = "/proc/driver/nvidia/version";

const DRIVER: &str = "NVIDIA driver";

#[derive(Debug)]
pub(super) struct CudaDiagnosis;

impl Diagnosis for CudaDiagnosis {
    fn has_devices(&self, machine: &Machine) -> bool {
        machine.exists(VERSION) || machine.exists("/dev/nvidiactl")
    }

    fn check_machine(&self, machine: &Machine, _is_available: bool) -> Vec<Finding> {
        let mut findings = visible_devices(machine);
        if machine.exists("/dev/dxg") {
            findings.push(Finding::warning(
                DRIVER,
                "this is WSL, on which device-ipc has not been tested",
                "see the round trips below, or use native Linux",
            ));
        } else if !self.has_devices(machine) {
            findings.push(Finding::ok(DRIVER, format!("not installed ({VERSION} does not exist)")));
        } else {
            findings.extend([
                driver(machine),
                nodes(machine),
                multi_instance(machine),
                fabric_channels(machine),
                shared_memory(machine),
            ]);
        }
        findings
    }

    fn check_backend(&self, backend: &dyn DeviceIpc) -> Vec<Finding> {
        let found = backend.devices().and_then(|devices| {
            let mut without_fault_isolation = Vec::new();
            for device in devices {
                if !backend.capabilities(device.ordinal)?.fault_isolation {
                    without_fault_isolation.push(device.ordinal.to_string());
                }
            }
            Ok(mps(&without_fault_isolation))
        });
        vec![found.unwrap_or_else(|error| {
            Finding::problem("MPS", error.to_string(), "check the errors of the driver: dmesg")
        })]
    }

    fn remedy(&self, symptom: Symptom<'_>) -> Option<&'static str> {
        match symptom {
            Symptom::LibraryFails => Some("nvidia-smi"),
            Symptom::NoPeerAccess => {
                Some("on the host, check nvidia-smi topo -p2p r and disable ACS and IOMMU")
            }
            Symptom::RoundTripFails { error } if error.contains("DEVICE_UNAVAILABLE") => {
                Some("if the compute mode is exclusive: nvidia-smi -c DEFAULT")
            }
            _ => None,
        }
    }
}

fn driver(machine: &Machine) -> Finding {
    let Some(text) = machine.text(VERSION) else {
        let change = "modprobe nvidia on the host; in a container, start it with --gpus all";
        return Finding::warning(DRIVER, format!("cannot read {VERSION}"), change);
    };
    match version(&text) {
        Some((major, whole)) if major < 470 => Finding::problem(
            DRIVER,
            format!("kernel driver {whole}"),
            "install version 470 (CUDA 11.4) or newer",
        ),
        Some((_, whole)) => Finding::ok(DRIVER, format!("kernel driver {whole}")),
        None => Finding::ok(DRIVER, format!("unknown version: {}", text.lines().next().unwrap_or_default())),
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

fn nodes(machine: &Machine) -> Finding {
    let check = "NVIDIA devices";
    let names = machine.names("/dev");
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
fn multi_instance(machine: &Machine) -> Finding {
    let check = "MIG and compute mode";
    let capabilities = "/proc/driver/nvidia/capabilities";
    let divided: Vec<String> = machine
        .names(capabilities)
        .into_iter()
        .filter(|gpu| {
            machine.names(&format!("{capabilities}/{gpu}/mig")).iter().any(|name| name.starts_with("gi"))
        })
        .collect();
    let hidden = machine.variable("CUDA_VISIBLE_DEVICES").is_some_and(|value| value.contains("MIG-"));
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

/// Returns whether processes share the contexts of devices through MPS.
fn mps(without_fault_isolation: &[String]) -> Finding {
    let check = "MPS";
    if without_fault_isolation.is_empty() {
        return Finding::ok(
            check,
            "not in use: a kernel that writes to a read-only mapping ends its own process's use of the device only",
        );
    }
    Finding::warning(
        check,
        format!(
            "in use on device {} (or not reported, by a driver before CUDA 12.1): a kernel that writes to a read-only mapping, or \
             a process that is killed while its kernels run, ends the use of the device for all processes of the MPS server",
            without_fault_isolation.join(", ")
        ),
        "to isolate the processes, run them without the control daemon: echo quit | nvidia-cuda-mps-control",
    )
}

fn fabric_channels(machine: &Machine) -> Finding {
    let check = "IMEX channels";
    let channels = machine.names("/dev/nvidia-caps-imex-channels");
    if channels.is_empty() {
        return Finding::ok(
            check,
            "none: memory that has only fabric handles cannot be shared, all other memory can (on a node with IMEX, \
             nvidia-modprobe -i 0:1 creates a channel)",
        );
    }
    Finding::ok(check, format!("{}: memory with fabric handles can be shared", channels.join(", ")))
}

/// Checks `/dev/shm`, in which CUDA places interprocess events.
fn shared_memory(machine: &Machine) -> Finding {
    let check = "/dev/shm";
    let change = "docker run --shm-size=1g …; in Kubernetes an emptyDir with medium Memory at /dev/shm; else: mount -t \
                  tmpfs -o size=1g tmpfs /dev/shm";
    if !machine.exists(check) {
        let found = "not mounted: CUDA requires it for interprocess events, so sharing with ready_on fails";
        return Finding::problem(check, found, change);
    }
    let mounted = machine.text("/proc/self/mountinfo").and_then(|text| mounted_at(&text, check));
    let Some((kind, bytes)) = mounted else {
        return Finding::warning(check, "plain directory, but CUDA requires a tmpfs", change);
    };
    if kind != "tmpfs" {
        return Finding::warning(check, format!("file system {kind}, but CUDA requires a tmpfs"), change);
    }
    let shown = bytes.map_or_else(
        || "half of the memory of the machine".to_owned(),
        |bytes| format!("{} MiB", bytes / (1024 * 1024)),
    );
    if bytes.is_some_and(|bytes| bytes < 16 * 1024 * 1024) {
        let found = format!("tmpfs of {shown}, which events of many exports and other libraries may fill");
        return Finding::warning(check, found, change);
    }
    let scope = if machine.in_container() {
        "; if it is private to this container, CUDA events cannot be shared with other containers; the shared counters that \
         device-ipc prefers can"
    } else {
        ""
    };
    Finding::ok(check, format!("tmpfs of {shown}{scope}"))
}

/// Returns file system and size in bytes of the last mount at this path (proc_pid_mountinfo(5)).
fn mounted_at(mountinfo: &str, path: &str) -> Option<(String, Option<u64>)> {
    let line = mountinfo.lines().rfind(|line| line.split(' ').nth(4) == Some(path))?;
    let (_, behind) = line.split_once(" - ")?;
    let mut fields = behind.split(' ');
    let kind = fields.next()?.to_owned();
    let options = fields.nth(1).unwrap_or_default();
    let size = options.split(',').find_map(|option| option.strip_prefix("size="));
    Some((kind, size.and_then(bytes_of)))
}

/// Parses a size such as `65536k`, `64m`, `1g`, or a number of bytes.
fn bytes_of(text: &str) -> Option<u64> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let unit: u64 = match &text[digits.len()..] {
        "" => 1,
        "k" => 1024,
        "m" => 1024 * 1024,
        "g" => 1024 * 1024 * 1024,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(unit)
}

/// The variable that the driver reads in each process.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";
/// The variable that the container runtime reads at the start of the container.
const CONTAINER: &str = "NVIDIA_VISIBLE_DEVICES";

fn visible_devices(machine: &Machine) -> Vec<Finding> {
    let set: Vec<Finding> = [
        machine.variable(VISIBLE).map(visible_to_process),
        machine.variable(CONTAINER).map(visible_to_container),
    ]
    .into_iter()
    .flatten()
    .collect();
    if set.is_empty() {
        let found = format!("no variable hides devices (not set: {VISIBLE}, {CONTAINER})");
        return vec![Finding::ok("visible devices of cuda", found)];
    }
    set
}

/// Checks the list of CUDA, which ends at the first entry that is not a device (CUDA programming guide, "CUDA Environment
/// Variables").
fn visible_to_process(value: &str) -> Finding {
    let entries: Vec<&str> = value.split(',').map(str::trim).collect();
    let change = format!("unset {VISIBLE}, or list the devices: {VISIBLE}=0,1");
    if entries[0].is_empty() || entries[0] == "-1" || entries[0] == "NoDevFiles" {
        return Finding::problem(VISIBLE, format!("{value:?} hides every GPU"), change);
    }
    let twice = entries.iter().enumerate().any(|(index, entry)| entries[..index].contains(entry));
    if twice {
        let found = format!("{value:?} lists a device twice, so CUDA sees none");
        return Finding::problem(VISIBLE, found, change);
    }
    if entries.iter().any(|entry| entry.is_empty() || *entry == "-1") {
        let found = format!("{value:?}: CUDA ignores everything from the first entry that is not a device");
        return Finding::warning(VISIBLE, found, change);
    }
    let found = format!(
        "{value:?}; ordinals may differ between processes, because descriptors identify devices by UUID"
    );
    Finding::ok(VISIBLE, found)
}

fn visible_to_container(value: &str) -> Finding {
    if matches!(value.trim(), "" | "void" | "none") {
        return Finding::warning(
            CONTAINER,
            format!("{value:?}: the container was started without devices"),
            format!("start it with devices, for example -e {CONTAINER}=0,1 or --gpus all"),
        );
    }
    Finding::ok(CONTAINER, format!("{value:?}"))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use device_ipc_core::backend::Verdict;

    use super::*;

    /// A machine with these files, and the directory that they are in.
    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Machine) {
        let root = tempfile::tempdir().unwrap();
        let machine = Machine::below(root.path());
        for (path, text) in files {
            let path = machine.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        (root, machine)
    }

    fn driver_file(version: &str) -> String {
        format!("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {version}  Release Build\nGCC 12\n")
    }

    #[test]
    fn driver_version_determines_the_verdict() {
        let (_root, bare) = machine(&[]);
        assert_eq!(CudaDiagnosis.check_machine(&bare, false).len(), 2);
        assert_eq!(driver(&bare).verdict, Verdict::Warning);
        let (_root, old) = machine(&[(VERSION, &driver_file("460.32.03"))]);
        let old = driver(&old);
        assert!(old.verdict == Verdict::Problem && old.found.contains("460.32.03"), "{old:?}");
        let (_root, good) = machine(&[(VERSION, &driver_file("580.159.04"))]);
        assert!(CudaDiagnosis.has_devices(&good));
        let good = driver(&good);
        assert!(good.verdict == Verdict::Ok && good.found.contains("580.159.04"), "{good:?}");
        let (_root, wsl) = machine(&[("/dev/dxg", "")]);
        assert_eq!(CudaDiagnosis.check_machine(&wsl, false)[1].verdict, Verdict::Warning);
    }

    #[test]
    fn missing_device_nodes_are_named() {
        let (_root, none) = machine(&[]);
        let none = nodes(&none);
        assert!(none.verdict == Verdict::Problem && none.change.unwrap().contains("--gpus all"));
        let cards = [("/dev/nvidiactl", ""), ("/dev/nvidia0", ""), ("/dev/nvidia1", "")];
        let (_root, half) = machine(&cards);
        let half = nodes(&half);
        assert!(half.verdict == Verdict::Problem && half.found.contains("nvidia-uvm"), "{half:?}");
        let whole = [&cards[..], &[("/dev/nvidia-uvm", ""), ("/dev/nvidia-uvm-tools", "")]].concat();
        let (_root, whole) = machine(&whole);
        let whole = nodes(&whole);
        assert_eq!((whole.verdict, whole.found.as_str()), (Verdict::Ok, "2 in /dev"));
    }

    #[test]
    fn mig_instances_are_a_warning() {
        let capabilities = "/proc/driver/nvidia/capabilities/gpu0/mig";
        let (_root, whole) = machine(&[(&format!("{capabilities}/access"), "")]);
        assert_eq!(multi_instance(&whole).verdict, Verdict::Ok);
        let (_root, divided) = machine(&[(&format!("{capabilities}/gi1/access"), "")]);
        let finding = multi_instance(&divided);
        assert!(finding.verdict == Verdict::Warning && finding.found.contains("gpu0"), "{finding:?}");
        let hidden = whole.with_variable("CUDA_VISIBLE_DEVICES", "MIG-1234");
        assert_eq!(multi_instance(&hidden).verdict, Verdict::Warning);
    }

    #[test]
    fn devices_behind_mps_are_a_warning() {
        assert_eq!(mps(&[]).verdict, Verdict::Ok);
        let finding = mps(&["0".into(), "2".into()]);
        assert!(finding.verdict == Verdict::Warning && finding.found.contains("device 0, 2"), "{finding:?}");
    }

    #[test]
    fn fabric_channels_are_listed() {
        let (_root, none) = machine(&[]);
        assert!(fabric_channels(&none).found.starts_with("none"));
        let (_root, some) = machine(&[("/dev/nvidia-caps-imex-channels/channel0", "")]);
        assert!(fabric_channels(&some).found.starts_with("channel0"));
    }

    #[test]
    fn shared_memory_mount_determines_the_verdict() {
        let (_root, missing) = machine(&[]);
        let missing = shared_memory(&missing);
        assert!(missing.verdict == Verdict::Problem && missing.change.unwrap().contains("--shm-size"));
        let mounted = |mount: &str, container: bool| {
            let mount = format!("22 1 0:20 / / rw shared:1 - overlay overlay rw\n{mount}\n");
            let mut files = vec![("/proc/self/mountinfo", mount.as_str()), ("/dev/shm/file", "")];
            files.extend(container.then_some(("/.dockerenv", "")));
            let (_root, machine) = machine(&files);
            shared_memory(&machine)
        };
        let small = "30 22 0:26 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,size=65536k,inode64";
        for (mount, verdict, text) in [
            ("", Verdict::Warning, "plain directory"),
            (small, Verdict::Ok, "64 MiB"),
            ("30 22 0:26 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,inode64", Verdict::Ok, "half of"),
            ("30 22 0:26 / /dev/shm rw - tmpfs shm rw,size=4096k", Verdict::Warning, "4 MiB"),
            ("30 22 0:26 / /dev/shm rw - ext4 /dev/sda1 rw", Verdict::Warning, "ext4"),
        ] {
            let finding = mounted(mount, false);
            assert!(finding.verdict == verdict && finding.found.contains(text), "{finding:?}");
        }
        let container = mounted(small, true);
        assert!(container.found.contains("private to this container"), "{container:?}");
    }

    #[test]
    fn sizes_of_mounts_are_parsed() {
        assert_eq!(bytes_of("65536k"), Some(64 * 1024 * 1024));
        assert_eq!(bytes_of("12"), Some(12));
        assert_eq!(bytes_of("1g"), Some(1 << 30));
        assert_eq!(bytes_of("50%"), None);
        assert_eq!(bytes_of("18446744073709551615g"), None);
    }

    #[test]
    fn visibility_variables_are_parsed_as_the_vendor_does() {
        for (name, value, verdict) in [
            (VISIBLE, "", Verdict::Problem),
            (VISIBLE, "-1", Verdict::Problem),
            (VISIBLE, "0,0", Verdict::Problem),
            (VISIBLE, "1,-1,0", Verdict::Warning),
            (VISIBLE, "1,0", Verdict::Ok),
            (VISIBLE, "GPU-1234", Verdict::Ok),
            (CONTAINER, "void", Verdict::Warning),
            (CONTAINER, "all", Verdict::Ok),
        ] {
            let (_root, machine) = machine(&[]);
            let findings = visible_devices(&machine.with_variable(name, value));
            assert_eq!(findings.len(), 1);
            assert_eq!((findings[0].check.as_ref(), findings[0].verdict), (name, verdict), "{value:?}");
        }
        assert_eq!(visible_devices(&machine(&[]).1)[0].verdict, Verdict::Ok);
    }

    #[test]
    fn exclusive_compute_mode_has_a_remedy() {
        let remedy = |error| CudaDiagnosis.remedy(Symptom::RoundTripFails { error });
        assert!(remedy("CUDA_ERROR_DEVICE_UNAVAILABLE").unwrap().contains("nvidia-smi -c DEFAULT"));
        assert_eq!(remedy("CUDA_ERROR_OUT_OF_MEMORY"), None);
    }
}
