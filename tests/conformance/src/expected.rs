//! The skips that a backend is allowed: a checked-in text, so that a case that no longer runs is noticed.
//!
//! One line for each: `variant/case: reason`. `*` stands for every variant, and the reason is what the skip says, or a
//! part of it. `[one device]` or `[several devices]` in front restricts a line to such machines. Lines that begin with
//! `#` are comments.

/// The list.
#[derive(Clone, Debug, Default)]
pub(crate) struct ExpectedSkips {
    entries: Vec<Entry>,
}

#[derive(Clone, Debug)]
struct Entry {
    machine: Machine,
    variant: String,
    case: String,
    reason: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Machine {
    Any,
    OneDevice,
    SeveralDevices,
}

impl ExpectedSkips {
    /// Reads the list; the errors name the lines that make no sense.
    pub(crate) fn parse(text: &str) -> Result<Self, Vec<String>> {
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
        let (entries, errors): (Vec<_>, Vec<_>) = lines.map(Entry::parse).partition(Result::is_ok);
        if errors.is_empty() {
            Ok(Self { entries: entries.into_iter().flatten().collect() })
        } else {
            Err(errors.into_iter().filter_map(Result::err).collect())
        }
    }

    /// The reason that is listed for this case on a machine with so many devices.
    pub(crate) fn reason(&self, variant: &str, case: &str, devices: usize) -> Option<&str> {
        let fits = |entry: &&Entry| {
            entry.machine.fits(devices)
                && entry.case == case
                && (entry.variant == "*" || entry.variant == variant)
        };
        self.entries.iter().find(fits).map(|entry| entry.reason.as_str())
    }

    /// Lines that name a variant or a case that there is not.
    pub(crate) fn unknown(&self, variants: &[&str], cases: &[&str]) -> Vec<String> {
        let unknown = |entry: &&Entry| {
            !cases.contains(&entry.case.as_str())
                || (entry.variant != "*" && !variants.contains(&entry.variant.as_str()))
        };
        self.entries.iter().filter(unknown).map(|entry| format!("{}/{}", entry.variant, entry.case)).collect()
    }
}

impl Entry {
    fn parse(line: &str) -> Result<Self, String> {
        let (machine, rest) = match line.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
            Some(("one device", rest)) => (Machine::OneDevice, rest),
            Some(("several devices", rest)) => (Machine::SeveralDevices, rest),
            Some((other, _)) => {
                return Err(format!("[{other}] is neither [one device] nor [several devices]: {line}"));
            }
            None => (Machine::Any, line),
        };
        // With the blank: names of cases have double colons.
        let parsed = rest.split_once(": ").and_then(|(name, reason)| {
            let (variant, case) = name.trim().split_once('/')?;
            let reason = Some(reason.trim()).filter(|reason| !reason.is_empty())?;
            Some(Self {
                machine,
                variant: variant.to_owned(),
                case: case.to_owned(),
                reason: reason.to_owned(),
            })
        });
        parsed.ok_or_else(|| format!("not of the form variant/case: reason: {line}"))
    }
}

impl Machine {
    const fn fits(self, devices: usize) -> bool {
        match self {
            Self::Any => true,
            Self::OneDevice => devices == 1,
            Self::SeveralDevices => devices > 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_apply_to_their_variant_and_machine() {
        let text = "# why\n*/t::a: no\n[one device] one/b: needs two\n\n[several devices] */c: many";
        let list = ExpectedSkips::parse(text).unwrap();
        assert_eq!(list.reason("any", "t::a", 1), Some("no"));
        assert_eq!(list.reason("one", "b", 1), Some("needs two"));
        assert_eq!(list.reason("one", "b", 2), None);
        assert_eq!(list.reason("two", "b", 1), None);
        assert_eq!(list.reason("two", "c", 8), Some("many"));
        assert_eq!(list.unknown(&["one"], &["t::a", "b"]), ["*/c"]);
    }

    #[test]
    fn lines_that_make_no_sense_are_named() {
        let errors = ExpectedSkips::parse("*/a: fine\nnonsense\n[no device] */a: b\n*/a:").unwrap_err();
        assert_eq!(errors.len(), 3, "{errors:?}");
    }
}
