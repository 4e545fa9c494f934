//! Checks of resource limits.

use std::fmt;

use indicatif::HumanBytes;

use crate::doctor::facts::Facts;
use device_ipc::backend::Finding;

pub(super) fn open_files(facts: &Facts) -> Finding {
    let check = "limit on open files";
    let change = "ulimit -n 65536 (docker run --ulimit nofile=65536; LimitNOFILE=65536 in systemd)";
    match limit(facts, "Max open files") {
        None => Finding::warning(check, "unknown: /proc/self/limits does not contain it", change),
        Some(Limit::Of(files)) if files < 64 => {
            Finding::problem(check, format!("{files} files, too few for sockets and handles"), change)
        }
        Some(Limit::Of(files)) if files < 1024 => Finding::warning(
            check,
            format!("{files} files; each shared block of virtual memory (2 MiB or more) requires one"),
            change,
        ),
        Some(limit) => {
            Finding::ok(check, format!("{limit} files; each shared block of virtual memory requires one"))
        }
    }
}

pub(super) fn locked_memory(facts: &Facts) -> Finding {
    let check = "limit on locked memory";
    let change = "ulimit -l unlimited (docker run --ulimit memlock=-1; LimitMEMLOCK=infinity in systemd)";
    match limit(facts, "Max locked memory") {
        None => Finding::warning(check, "unknown: /proc/self/limits does not contain it", change),
        Some(Limit::Of(bytes)) if bytes < 64 * 1024 => Finding::warning(
            check,
            format!("{}: counter pages that streams wait for are pinned, 4 KiB each", HumanBytes(bytes)),
            change,
        ),
        Some(Limit::Of(bytes)) => Finding::ok(check, HumanBytes(bytes).to_string()),
        Some(Limit::None) => Finding::ok(check, "unlimited"),
    }
}

enum Limit {
    None,
    Of(u64),
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("unlimited"),
            Self::Of(limit) => limit.fmt(f),
        }
    }
}

/// Returns the soft limit (proc_pid_limits(5)).
fn limit(facts: &Facts, name: &str) -> Option<Limit> {
    let limits = facts.machine.text("/proc/self/limits")?;
    let soft = limits.lines().find_map(|line| line.strip_prefix(name)?.split_whitespace().next())?;
    if soft == "unlimited" { Some(Limit::None) } else { soft.parse().ok().map(Limit::Of) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::facts::tests::TestMachine;
    use device_ipc::backend::Verdict;

    #[test]
    fn limits_determine_the_verdict() {
        let machine = |files: &str, locked: &str| {
            let text = format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max open files            {files}                 524288               files     \n\
                 Max locked memory         {locked}              8388608              bytes     \n"
            );
            TestMachine::new().with("/proc/self/limits", &text)
        };
        for (files, verdict) in [
            ("1024", Verdict::Ok),
            ("unlimited", Verdict::Ok),
            ("256", Verdict::Warning),
            ("16", Verdict::Problem),
        ] {
            assert_eq!(open_files(&machine(files, "0").facts).verdict, verdict, "{files}");
        }
        for (locked, verdict) in
            [("8388608", Verdict::Ok), ("unlimited", Verdict::Ok), ("0", Verdict::Warning)]
        {
            assert_eq!(locked_memory(&machine("1024", locked).facts).verdict, verdict, "{locked}");
        }
        assert_eq!(open_files(&TestMachine::new().facts).verdict, Verdict::Warning);
    }
}
