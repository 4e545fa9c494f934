//! Check of `/dev/shm`, in which CUDA places interprocess events.

use indicatif::HumanBytes;

use crate::doctor::facts::Facts;
use crate::doctor::finding::Finding;

pub(super) fn shared_memory(facts: &Facts) -> Finding {
    let check = "/dev/shm";
    let change = "docker run --shm-size=1g …; in Kubernetes an emptyDir with medium Memory at /dev/shm; else: mount -t \
                  tmpfs -o size=1g tmpfs /dev/shm";
    if !facts.exists("/dev/shm") {
        let found = "not mounted: CUDA requires it for interprocess events, so sharing with ready_on fails";
        // Other backends do not require it.
        let make = if facts.has_nvidia_driver() { Finding::problem } else { Finding::warning };
        return make(check, found.to_owned(), change.to_owned());
    }
    let Some((kind, size)) = facts.text("/proc/self/mountinfo").and_then(|text| mounted_at(&text, check))
    else {
        return Finding::warning(check, "plain directory, but CUDA requires a tmpfs", change);
    };
    if kind != "tmpfs" {
        return Finding::warning(check, format!("file system {kind}, but CUDA requires a tmpfs"), change);
    }
    let shown =
        size.map_or("half of the memory of the machine".to_owned(), |size| HumanBytes(size).to_string());
    if size.is_some_and(|size| size < 16 * 1024 * 1024) {
        let found = format!("tmpfs of {shown}, which events of many exports and other libraries may fill");
        return Finding::warning(check, found, change);
    }
    let scope = if facts.in_container() {
        "; if it is private to this container, CUDA events cannot be shared with other containers; the \
         shared counters that device-ipc prefers can"
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::facts::tests::Machine;
    use crate::doctor::finding::Verdict;

    fn found(finding: &Finding) -> (Verdict, &str) {
        (finding.verdict, &finding.found)
    }

    fn with_shm(mount: &str) -> Machine {
        Machine::new().with_directory("/dev/shm").with("/proc/self/mountinfo", mount)
    }

    #[test]
    fn shared_memory_mount_determines_the_verdict() {
        assert_eq!(shared_memory(&Machine::new().facts).verdict, Verdict::Warning);
        let missing = shared_memory(&Machine::new().with("/proc/driver/nvidia/version", "").facts);
        assert!(missing.verdict == Verdict::Problem && missing.change.unwrap().contains("--shm-size"));
        let directory = shared_memory(&with_shm("").facts);
        assert!(directory.verdict == Verdict::Warning && directory.found.contains("plain directory"));
        let root = "22 1 0:20 / / rw shared:1 - overlay overlay rw\n";
        for (mount, verdict, text) in [
            (
                "30 22 0:26 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,size=65536k,inode64",
                Verdict::Ok,
                "64.00 MiB",
            ),
            ("30 22 0:26 / /dev/shm rw,nosuid shared:4 - tmpfs tmpfs rw,inode64", Verdict::Ok, "half of"),
            ("30 22 0:26 / /dev/shm rw - tmpfs shm rw,size=4096k", Verdict::Warning, "4.00 MiB"),
            ("30 22 0:26 / /dev/shm rw - ext4 /dev/sda1 rw", Verdict::Warning, "ext4"),
        ] {
            let finding = shared_memory(&with_shm(&format!("{root}{mount}\n")).facts);
            assert!(found(&finding).0 == verdict && finding.found.contains(text), "{finding}");
        }
        let mount = "30 22 0:26 / /dev/shm rw - tmpfs shm rw,size=65536k";
        let container = shared_memory(&with_shm(mount).with("/.dockerenv", "").facts);
        assert!(
            container.verdict == Verdict::Ok && container.found.contains("private to this container"),
            "{container}"
        );
    }

    #[test]
    fn bytes_of_parses_units() {
        assert_eq!(bytes_of("65536k"), Some(64 * 1024 * 1024));
        assert_eq!(bytes_of("12"), Some(12));
        assert_eq!(bytes_of("1g"), Some(1 << 30));
        assert_eq!(bytes_of("50%"), None);
        assert_eq!(bytes_of("18446744073709551615g"), None);
    }
}
