//! The command line of a run: what cargo and nextest pass to a test binary.

/// What to run, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Arguments {
    pub(crate) list: bool,
    pub(crate) ignored: bool,
    pub(crate) exact: bool,
    pub(crate) variant: Option<String>,
    pub(crate) filters: Vec<String>,
    pub(crate) jobs: Option<usize>,
}

impl Arguments {
    /// Reads the arguments; flags of the standard harness that mean nothing here are passed over.
    pub(crate) fn parse(arguments: impl IntoIterator<Item = String>) -> Self {
        let mut parsed = Self::default();
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let (name, value) = match argument.split_once('=') {
                Some((name, value)) if name.starts_with("--") => (name.to_owned(), Some(value.to_owned())),
                _ => (argument, None),
            };
            let mut value = || value.clone().or_else(|| arguments.next());
            match name.as_str() {
                "--list" => parsed.list = true,
                "--ignored" => parsed.ignored = true,
                "--exact" => parsed.exact = true,
                "--variant" => parsed.variant = value(),
                "--test-threads" => parsed.jobs = value().and_then(|count| count.parse().ok()),
                "--format" | "--color" | "--skip" | "--logfile" | "-Z" => drop(value()),
                flag if flag.starts_with('-') => {}
                _ => parsed.filters.push(name),
            }
        }
        parsed
    }

    /// Is this case wanted? Its full name is `suite/variant/case`.
    pub(crate) fn wants(&self, variant: &str, full_name: &str) -> bool {
        let named = |filter: &String| {
            if self.exact { full_name == filter } else { full_name.contains(filter.as_str()) }
        };
        self.variant.as_deref().is_none_or(|wanted| wanted == variant)
            && (self.filters.is_empty() || self.filters.iter().any(named))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Arguments {
        Arguments::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn what_cargo_and_nextest_pass_is_understood() {
        let parsed = parse("--nocapture round --test-threads=3 --variant revoking --format terse");
        assert_eq!(parsed.filters, ["round"]);
        assert_eq!((parsed.jobs, parsed.variant.as_deref()), (Some(3), Some("revoking")));
        assert!(parse("--list --format terse --ignored").ignored);
    }

    #[test]
    fn filters_are_parts_of_names_unless_exact() {
        assert!(parse("trip").wants("default", "mock/default/round_trip"));
        assert!(!parse("--exact trip").wants("default", "mock/default/round_trip"));
        assert!(parse("--exact mock/default/round_trip").wants("default", "mock/default/round_trip"));
        assert!(!parse("--variant other").wants("default", "mock/default/round_trip"));
    }
}
