//! What NVIDIA's files tell: the kernel's driver, the nodes in `/dev`, MIG, IMEX channels.

use super::facts::Facts;
use super::finding::Finding;

const VERSION: &str = "/proc/driver/nvidia/version";

pub(super) fn check(facts: &Facts) -> Vec<Finding> {
    if facts.exists("/dev/dxg") {
        return vec![Finding::warning(
            "NVIDIA driver",
            "this is WSL, where nobody has tried this library",
            "see what the round trips below say, or use Linux itself",
        )];
    }
    if !is_there(facts) {
        return vec![Finding::ok("NVIDIA driver", format!("none here ({VERSION} is not there)"))];
    }
    vec![driver(facts), nodes(facts), multi_instance(facts), fabric_channels(facts)]
}

/// Is there a driver of NVIDIA's in the kernel?
pub(super) fn is_there(facts: &Facts) -> bool {
    facts.exists(VERSION) || facts.exists("/dev/nvidiactl")
}

fn driver(facts: &Facts) -> Finding {
    let check = "NVIDIA driver";
    let Some(text) = facts.text(VERSION) else {
        let change = "modprobe nvidia on the host; in a container, start it with --gpus all";
        return Finding::warning(check, format!("{VERSION} cannot be read"), change);
    };
    match version(&text) {
        Some((major, whole)) if major < 470 => Finding::problem(
            check,
            format!("{whole} in the kernel"),
            "install version 470 (CUDA 11.4) or newer",
        ),
        Some((_, whole)) => Finding::ok(check, format!("{whole} in the kernel")),
        None => {
            Finding::ok(check, format!("of an unknown version: {}", text.lines().next().unwrap_or_default()))
        }
    }
}

/// The first word that looks like `580.159.04`.
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
            "the driver is in the kernel, and /dev/nvidiactl or /dev/nvidia0 is not here",
            "start the container with --gpus all (nvidia-container-toolkit); on the host: nvidia-smi",
        );
    }
    if !names.iter().any(|name| name == "nvidia-uvm") {
        return Finding::problem(
            check,
            "/dev/nvidia-uvm is not here, and CUDA cannot start without it",
            "nvidia-modprobe -u -c=0 on the host, then start the container again",
        );
    }
    Finding::ok(check, format!("{cards} in /dev"))
}

/// GPU instances have directories below the capabilities of their card.
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
            "no card is divided into instances; no file tells the compute mode, but a second process does not get in where \
             that is exclusive",
        );
    }
    Finding::warning(
        check,
        format!(
            "cards are divided into GPU instances ({}), which share no memory with each other",
            divided.join(", ")
        ),
        "give sender and receivers the same instance (CUDA_VISIBLE_DEVICES=MIG-…), or turn it off: nvidia-smi -mig 0",
    )
}

fn fabric_channels(facts: &Facts) -> Finding {
    let check = "IMEX channels";
    let channels = facts.names("/dev/nvidia-caps-imex-channels");
    if channels.is_empty() {
        return Finding::ok(
            check,
            "none: memory with fabric handles alone cannot be shared, and all other memory can (nvidia-modprobe -i 0:1 \
             would make a channel where the node has IMEX)",
        );
    }
    Finding::ok(check, format!("{}: memory with fabric handles can be shared", channels.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::super::facts::tests::Machine;
    use super::super::finding::Verdict;
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
    fn the_kernels_driver_is_absent_old_or_good() {
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
    fn nodes_that_a_container_lacks_are_named() {
        let none = nodes(&with_driver("580.1").facts);
        assert!(none.verdict == Verdict::Problem && none.change.unwrap().contains("--gpus all"));
        let half = nodes(&with_cards().facts);
        assert!(half.verdict == Verdict::Problem && half.found.contains("nvidia-uvm"), "{half}");
        let whole = nodes(&with_cards().with("/dev/nvidia-uvm", "").with("/dev/nvidia-uvm-tools", "").facts);
        assert_eq!((whole.verdict, whole.found.as_str()), (Verdict::Ok, "2 in /dev"));
    }

    #[test]
    fn cards_that_are_divided_are_told() {
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
    fn fabric_channels_are_listed() {
        assert!(fabric_channels(&with_cards().facts).found.starts_with("none"));
        let machine = with_cards().with("/dev/nvidia-caps-imex-channels/channel0", "");
        assert!(fabric_channels(&machine.facts).found.starts_with("channel0"));
    }
}
