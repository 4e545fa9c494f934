//! The skips that a backend is allowed: a checked-in text, so that a case that no longer runs is noticed.
//!
//! One line for each: `variant/theme::case: reason`. The variant `*` is every variant, and the case `theme::*` is every
//! case of the theme; a line that names the case comes first. The reason is the reason of the skip, or a part of it.
//! `[one device]` or `[several devices]` in front restricts a line to such machines. Lines that begin with `#` are
//! comments.
//!
//! A case that a line names has to be skipped. A line of `theme::*` permits skips: some case of the theme has to be
//! skipped for its reason.

use std::collections::BTreeMap;

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

    /// Compares the skip of a case with the list; the error says what is wrong.
    pub(crate) fn check_skip(&self, at: Position<'_>, reason: &str) -> Result<(), Mismatch> {
        let mut listed = self.entries_for(at).peekable();
        if listed.peek().is_none() {
            return Err(Mismatch::NotListed);
        }
        let reasons: Vec<_> = listed.map(|entry| entry.reason.as_str()).collect();
        if reasons.iter().any(|expected| reason.contains(expected)) {
            return Ok(());
        }
        Err(Mismatch::OtherReason(reasons.join("\", \"")))
    }

    /// Returns whether a line names this case, which therefore has to be skipped.
    pub(crate) fn must_skip(&self, at: Position<'_>) -> bool {
        self.entries_for(at).any(|entry| entry.case == at.case)
    }

    /// The lines that apply to a case: those that name it, else those of its theme.
    fn entries_for<'a>(&'a self, at: Position<'a>) -> impl Iterator<Item = &'a Entry> {
        let of_the_case = |entry: &&Entry| entry.applies_to(at) && entry.case == at.case;
        let named = self.entries.iter().any(|entry| of_the_case(&entry));
        self.entries.iter().filter(move |entry| {
            entry.applies_to(at) && if named { entry.case == at.case } else { entry.is_of_theme(at.case) }
        })
    }

    /// The lines that name a variant or a case that does not exist.
    pub(crate) fn unknown(&self, variants: &[&str], cases: &[&str]) -> Vec<String> {
        let unknown = |entry: &&Entry| {
            !cases.iter().any(|case| entry.case == *case || entry.is_of_theme(case))
                || (entry.variant != "*" && !variants.contains(&entry.variant.as_str()))
        };
        self.entries.iter().filter(unknown).map(Entry::name).collect()
    }

    /// The lines of `theme::*` on these machines that none of the skips fits.
    pub(crate) fn unused_themes(&self, devices: &BTreeMap<&str, usize>, skips: &[Skip]) -> Vec<String> {
        let could_apply = |entry: &Entry| {
            let mut machines = devices.iter();
            machines
                .any(|(variant, devices)| entry.applies_to(Position { variant, case: "", devices: *devices }))
        };
        let fits = |entry: &Entry, skip: &Skip| {
            let devices = devices.get(skip.variant.as_str()).copied().unwrap_or_default();
            entry.applies_to(Position { variant: &skip.variant, case: &skip.case, devices })
                && entry.is_of_theme(&skip.case)
                && skip.reason.contains(&entry.reason)
        };
        let unused = |entry: &&Entry| {
            entry.case.ends_with("::*") && could_apply(entry) && !skips.iter().any(|skip| fits(entry, skip))
        };
        self.entries.iter().filter(unused).map(Entry::name).collect()
    }
}

/// A case on a machine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position<'a> {
    pub(crate) variant: &'a str,
    pub(crate) case: &'a str,
    /// The number of devices.
    pub(crate) devices: usize,
}

/// The error of a skip.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Mismatch {
    NotListed,
    /// The reasons that are listed.
    OtherReason(String),
}

/// A case that was skipped.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Skip {
    pub(crate) variant: String,
    pub(crate) case: String,
    pub(crate) reason: String,
}

/// Writes skips as lines of the list: one line where all variants skip a case for the same reason, and one where a variant
/// skips several cases of a theme, and no other, for the same reason.
pub(crate) fn as_lines(skips: &[Skip], variants: &[&str], cases: &[&str]) -> Vec<String> {
    let mut by_theme = BTreeMap::<_, Vec<&Skip>>::new();
    for skip in skips {
        let theme = skip.case.split("::").next().unwrap_or_default();
        by_theme.entry((theme, &skip.variant, &skip.reason)).or_default().push(skip);
    }
    let mut lines = BTreeMap::<_, Vec<&str>>::new();
    for ((theme, variant, reason), skips) in by_theme {
        let prefix = format!("{theme}::");
        let whole =
            skips.len() > 1 && skips.len() == cases.iter().filter(|case| case.starts_with(&prefix)).count();
        if whole {
            lines.entry((format!("{theme}::*"), reason)).or_default().push(variant);
            continue;
        }
        for skip in skips {
            lines.entry((skip.case.clone(), reason)).or_default().push(variant);
        }
    }
    let mut written = Vec::new();
    for ((case, reason), of) in lines {
        if of.len() == variants.len() {
            written.push(format!("*/{case}: {reason}"));
        } else {
            written.extend(of.iter().map(|variant| format!("{variant}/{case}: {reason}")));
        }
    }
    written
}

impl Entry {
    fn name(&self) -> String {
        format!("{}/{}", self.variant, self.case)
    }

    fn applies_to(&self, at: Position<'_>) -> bool {
        self.machine.fits(at.devices) && (self.variant == "*" || self.variant == at.variant)
    }

    /// Is it a line of the case's whole theme?
    fn is_of_theme(&self, case: &str) -> bool {
        let theme = self.case.strip_suffix('*').filter(|theme| theme.ends_with("::"));
        theme.is_some_and(|theme| case.starts_with(theme))
    }

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

    fn at<'a>(variant: &'a str, case: &'a str, devices: usize) -> Position<'a> {
        Position { variant, case, devices }
    }

    fn skip(variant: &str, case: &str, reason: &str) -> Skip {
        Skip { variant: variant.into(), case: case.into(), reason: reason.into() }
    }

    #[test]
    fn lines_apply_to_their_variant_and_machine() {
        let text = "# why\n*/t::a: no\n[one device] one/b: needs two\n\n[several devices] */c: many";
        let list = ExpectedSkips::parse(text).unwrap();
        assert_eq!(list.check_skip(at("any", "t::a", 1), "there is no such"), Ok(()));
        let other = Mismatch::OtherReason("no".into());
        assert_eq!(list.check_skip(at("any", "t::a", 1), "why"), Err(other));
        assert_eq!(list.check_skip(at("one", "b", 1), "needs two"), Ok(()));
        assert_eq!(list.check_skip(at("one", "b", 2), "needs two"), Err(Mismatch::NotListed));
        assert_eq!(list.check_skip(at("two", "b", 1), "needs two"), Err(Mismatch::NotListed));
        assert!(list.must_skip(at("two", "c", 8)) && !list.must_skip(at("two", "c", 1)));
        assert_eq!(list.unknown(&["one"], &["t::a", "b"]), ["*/c"]);
    }

    #[test]
    fn theme_line_permits_skips_of_the_theme() {
        let list =
            ExpectedSkips::parse("off/t::*: has none\noff/t::b: other\n*/gone::*: x\n*/u::*: y").unwrap();
        assert_eq!(list.check_skip(at("off", "t::a", 1), "it has none"), Ok(()));
        assert!(list.check_skip(at("off", "t::b", 1), "it has none").is_err(), "its own line comes first");
        assert_eq!(list.check_skip(at("on", "t::a", 1), "it has none"), Err(Mismatch::NotListed));
        assert!(!list.must_skip(at("off", "t::a", 1)) && list.must_skip(at("off", "t::b", 1)));
        assert_eq!(list.unknown(&["off"], &["t::a", "t::b", "u::a"]), ["*/gone::*"]);
        let devices = BTreeMap::from([("off", 1)]);
        assert_eq!(
            list.unused_themes(&devices, &[skip("off", "t::a", "it has none")]),
            ["*/gone::*", "*/u::*"]
        );
        assert_eq!(
            list.unused_themes(&BTreeMap::from([("on", 1)]), &[skip("on", "u::a", "y")]),
            ["*/gone::*"]
        );
    }

    #[test]
    fn skips_are_written_as_the_lines_that_permit_them() {
        let skips = [
            skip("a", "t::one", "no"),
            skip("b", "t::one", "no"),
            skip("a", "u::one", "none"),
            skip("a", "u::two", "none"),
            skip("b", "t::two", "else"),
        ];
        let cases = ["t::one", "t::two", "u::one", "u::two"];
        let lines = as_lines(&skips, &["a", "b"], &cases);
        assert_eq!(lines, ["*/t::one: no", "b/t::two: else", "a/u::*: none"]);
        let list = ExpectedSkips::parse(&lines.join("\n")).unwrap();
        for skip in &skips {
            assert_eq!(list.check_skip(at(&skip.variant, &skip.case, 1), &skip.reason), Ok(()));
        }
    }

    #[test]
    fn lines_that_make_no_sense_are_named() {
        let errors = ExpectedSkips::parse("*/a: fine\nnonsense\n[no device] */a: b\n*/a:").unwrap_err();
        assert_eq!(errors.len(), 3, "{errors:?}");
    }
}
