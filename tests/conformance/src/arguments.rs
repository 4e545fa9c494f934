//! The command line of a run: the arguments that cargo and nextest pass to a test binary.

use std::fmt::Write;

/// The text of `--help`.
pub(crate) const HELP: &str = "\
Runs the conformance suite, each case in a process of its own.

usage: cargo test --test conformance -- [OPTIONS] [FILTER]...

A FILTER is a part of a case's full name, suite/variant/theme::case. Without one, every case of every variant runs.

options:
  --list              list the cases and run none
  --variant NAME      run the cases of this variant only
  --exact             a FILTER is a full name
  --skip PART         do not run the cases whose full name has this part; may be repeated
  --test-threads N    run N cases at a time, by default RUST_TEST_THREADS
  -h, --help          print this text

environment:
  DEVICE_IPC_CONFORMANCE_REQUIRE=1     fail where the backend is unavailable, instead of skipping
  DEVICE_IPC_CONFORMANCE_DEADLINE=60   the time limit of a case in seconds
";

/// Flags of the standard harness that have no meaning here.
const IGNORED_FLAGS: [&str; 8] = [
    "--nocapture",
    "--no-capture",
    "--show-output",
    "--quiet",
    "-q",
    "--test",
    "--include-ignored",
    "--report-time",
];

/// Options of the standard harness that have a value and no meaning here.
const IGNORED_OPTIONS: [&str; 4] = ["--format", "--color", "--logfile", "-Z"];

/// The cases to run, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Arguments {
    pub(crate) help: bool,
    pub(crate) list: bool,
    pub(crate) ignored: bool,
    pub(crate) exact: bool,
    pub(crate) variant: Option<String>,
    pub(crate) filters: Vec<String>,
    pub(crate) skips: Vec<String>,
    pub(crate) jobs: Option<usize>,
}

impl Arguments {
    /// Reads the arguments. The error names the argument that is not known, or its value.
    pub(crate) fn parse(arguments: impl IntoIterator<Item = String>) -> Result<Self, String> {
        let mut parsed = Self::default();
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let (name, value) = match argument.split_once('=') {
                Some((name, value)) if name.starts_with("--") => (name.to_owned(), Some(value.to_owned())),
                _ => (argument, None),
            };
            let mut value = || {
                let value = value.clone().or_else(|| arguments.next());
                value.ok_or_else(|| format!("{name} needs a value"))
            };
            match name.as_str() {
                "--help" | "-h" => parsed.help = true,
                "--list" => parsed.list = true,
                "--ignored" => parsed.ignored = true,
                "--exact" => parsed.exact = true,
                "--variant" => parsed.variant = Some(value()?),
                "--skip" => parsed.skips.push(value()?),
                "--test-threads" => {
                    let text = value()?;
                    let count = text.parse().ok().filter(|count| *count > 0);
                    let count =
                        count.ok_or_else(|| format!("--test-threads {text}: not a number above 0"))?;
                    parsed.jobs = Some(count);
                }
                option if IGNORED_OPTIONS.contains(&option) => drop(value()?),
                flag if IGNORED_FLAGS.contains(&flag) => {}
                flag if flag.starts_with('-') => {
                    return Err(format!("unknown option {flag}; --help lists the options"));
                }
                _ => parsed.filters.push(name),
            }
        }
        Ok(parsed)
    }

    /// Refuses a variant that the suite does not have.
    pub(crate) fn check_variant(&self, variants: &[&str]) -> Result<(), String> {
        let Some(wanted) = self.variant.as_deref().filter(|wanted| !variants.contains(wanted)) else {
            return Ok(());
        };
        let mut text = format!("unknown variant {wanted:?}; the variants are:");
        for variant in variants {
            // Writing to a string cannot fail.
            let _ = write!(text, " {variant}");
        }
        Err(text)
    }

    /// Returns whether the case of this full name, `suite/variant/case`, is to run.
    pub(crate) fn wants(&self, variant: &str, full_name: &str) -> bool {
        let named = |filter: &String| {
            if self.exact { full_name == filter } else { full_name.contains(filter.as_str()) }
        };
        self.variant.as_deref().is_none_or(|wanted| wanted == variant)
            && (self.filters.is_empty() || self.filters.iter().any(named))
            && !self.skips.iter().any(named)
    }

    /// Returns whether every case of every variant is to run.
    pub(crate) const fn wants_everything(&self) -> bool {
        self.variant.is_none() && self.filters.is_empty() && self.skips.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn try_parse(line: &str) -> Result<Arguments, String> {
        Arguments::parse(line.split_whitespace().map(str::to_owned))
    }

    fn parse(line: &str) -> Arguments {
        try_parse(line).unwrap()
    }

    #[test]
    fn arguments_of_cargo_and_nextest_are_accepted() {
        let parsed = parse("--nocapture round --test-threads=3 --variant revoking --format terse");
        assert_eq!(parsed.filters, ["round"]);
        assert_eq!((parsed.jobs, parsed.variant.as_deref()), (Some(3), Some("revoking")));
        assert!(parse("--list --format terse --ignored").ignored);
        assert!(parse("-h").help && parse("--help").help);
    }

    #[test]
    fn unknown_arguments_are_named() {
        for (line, part) in [
            ("--varient x", "--varient"),
            ("-x", "-x"),
            ("--test-threads many", "many"),
            ("--test-threads 0", "0"),
            ("--variant", "--variant needs a value"),
        ] {
            let error = try_parse(line).unwrap_err();
            assert!(error.contains(part), "{line}: {error}");
        }
        let error = parse("--variant slwo").check_variant(&["default", "slow"]).unwrap_err();
        assert!(error.contains("\"slwo\"") && error.contains("default slow"), "{error}");
        assert_eq!(parse("--variant slow").check_variant(&["default", "slow"]), Ok(()));
    }

    #[test]
    fn filters_are_parts_of_names_unless_exact() {
        assert!(parse("trip").wants("default", "mock/default/round_trip"));
        assert!(!parse("--exact trip").wants("default", "mock/default/round_trip"));
        assert!(parse("--exact mock/default/round_trip").wants("default", "mock/default/round_trip"));
        assert!(!parse("--variant other").wants("default", "mock/default/round_trip"));
        assert!(!parse("--skip round").wants("default", "mock/default/round_trip"));
        assert!(parse("").wants_everything() && !parse("--skip round").wants_everything());
    }
}
