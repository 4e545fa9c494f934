//! Options that every command takes, and parsers of values that several commands take.

use std::ffi::OsStr;
use std::sync::LazyLock;
use std::time::Duration;

use anstream::ColorChoice;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{ArgAction, ValueEnum};
use device_ipc::backend::{Backends, Registration};
use device_ipc::{AllowList, Dtype};
use tracing_subscriber::filter::LevelFilter;

use crate::memory::dtype_of_name;
use crate::output;

/// The longest duration that an option takes. The sum of a point in time and a longer one may overflow.
const MAX_DURATION: Duration = Duration::from_secs(365 * 24 * 3600);

/// Options of every command, before or after its name.
#[derive(clap::Args)]
pub(crate) struct GlobalArguments {
    /// Print JSON: one document, or one object per line for a command that reports events
    #[arg(long, global = true, help_heading = "Global options")]
    pub(crate) json: bool,
    /// Log more to standard error: -v what the library does, -vv each call, -vvv everything
    #[arg(short, long, global = true, action = ArgAction::Count, conflicts_with = "quiet", help_heading = "Global options")]
    verbose: u8,
    /// Print only results and errors: no warnings, notices or progress
    #[arg(short, long, global = true, help_heading = "Global options")]
    quiet: bool,
    /// When to use colors; 'auto' uses them on a terminal, unless NO_COLOR is set
    #[arg(
        long,
        global = true,
        value_enum,
        default_value_t,
        value_name = "WHEN",
        help_heading = "Global options"
    )]
    color: Color,
}

#[derive(Clone, Copy, Default, ValueEnum)]
enum Color {
    #[default]
    Auto,
    Always,
    Never,
}

impl Color {
    const fn choice(self) -> ColorChoice {
        match self {
            Self::Auto => ColorChoice::Auto,
            Self::Always => ColorChoice::Always,
            Self::Never => ColorChoice::Never,
        }
    }
}

impl GlobalArguments {
    /// Applies the options to this process.
    pub(crate) fn apply(&self) {
        self.color.choice().write_global();
        output::set_quiet(self.quiet);
        let level = match (self.quiet, self.verbose) {
            (true, _) => LevelFilter::ERROR,
            (false, 0) => LevelFilter::WARN,
            (false, 1) => LevelFilter::INFO,
            (false, 2) => LevelFilter::DEBUG,
            (false, _) => LevelFilter::TRACE,
        };
        let colored = anstream::AutoStream::choice(&std::io::stderr()) != ColorChoice::Never;
        tracing_subscriber::fmt()
            .with_max_level(level)
            .with_writer(std::io::stderr)
            .with_ansi(colored)
            .without_time()
            .init();
    }
}

/// Returns the choice of colors for help and usage errors, which clap prints before the options are parsed.
pub(crate) fn color_of_help<'a>(arguments: impl IntoIterator<Item = &'a OsStr>) -> clap::ColorChoice {
    let mut choice = clap::ColorChoice::Auto;
    let mut follows = false;
    for argument in arguments.into_iter().filter_map(OsStr::to_str).take_while(|one| *one != "--") {
        let value = if follows { Some(argument) } else { argument.strip_prefix("--color=") };
        follows = argument == "--color";
        choice = value.and_then(|value| value.parse().ok()).unwrap_or(choice);
    }
    choice
}

/// Returns the parser of the name of a backend, which suggests the known names.
pub(crate) fn backend() -> PossibleValuesParser {
    PossibleValuesParser::new(Backends::registered().registrations().iter().map(Registration::name))
}

/// The short names of the element types: `f32` for `float32`.
static DTYPE_ALIASES: LazyLock<Vec<(&'static str, String)>> = LazyLock::new(|| {
    let names = Dtype::ALL.iter().filter_map(|dtype| dtype.name());
    let alias = |name: &str| {
        let long = ["bfloat", "float", "uint", "int", "complex"].into_iter().zip(["bf", "f", "u", "i", "c"]);
        long.into_iter().find_map(|(long, short)| Some(format!("{short}{}", name.strip_prefix(long)?)))
    };
    names.filter_map(|name| Some((name, alias(name)?))).collect()
});

/// Returns the parser of an element type: its PyTorch name or its short name.
pub(crate) fn dtype() -> impl TypedValueParser<Value = Dtype> {
    let values = Dtype::ALL.iter().filter_map(|dtype| dtype.name()).map(|name| {
        let alias = DTYPE_ALIASES.iter().find(|(long, _)| *long == name);
        let value = PossibleValue::new(name);
        match alias {
            Some((_, alias)) => value.alias(alias.as_str()),
            None => value,
        }
    });
    PossibleValuesParser::new(values).try_map(|name| {
        let long = DTYPE_ALIASES.iter().find(|(_, alias)| *alias == name);
        dtype_of_name(long.map_or(&name, |(long, _)| long))
    })
}

/// Parses a duration with its unit: `10s`, `500ms`, `1m 30s`.
pub(crate) fn duration(text: &str) -> Result<Duration, String> {
    let parsed = humantime::parse_duration(text)
        .map_err(|_| "a duration is a number with a unit: 500ms, 10s, 2m, 1h".to_owned())?;
    if parsed > MAX_DURATION {
        return Err("the longest duration is 365d".into());
    }
    Ok(parsed)
}

/// Parses a duration that is not zero.
pub(crate) fn positive_duration(text: &str) -> Result<Duration, String> {
    match duration(text)? {
        Duration::ZERO => Err("a duration greater than zero is required".into()),
        positive => Ok(positive),
    }
}

/// Formats a duration as [`duration`] parses it.
pub(crate) fn shown(duration: Duration) -> impl std::fmt::Display {
    humantime::format_duration(duration)
}

/// Checks the form `IP` or `IP:PORT`.
#[cfg(feature = "nixl")]
pub(crate) fn interface(text: &str) -> Result<String, String> {
    let is_valid = text.parse::<std::net::IpAddr>().is_ok() || text.parse::<std::net::SocketAddr>().is_ok();
    if is_valid {
        Ok(text.to_owned())
    } else {
        Err("the address of a network interface is IP or IP:PORT, for example 10.0.0.1".into())
    }
}

/// Parses the position of a device.
pub(crate) fn device(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "a device is a number, from 0; list them with 'device-ipc devices'".into())
}

/// Parses the size of one dimension of a shape.
pub(crate) fn dimension(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "a shape is the size of each dimension, separated by commas: 4,5".into())
}

/// Parses the value of a byte.
pub(crate) fn byte(text: &str) -> Result<u8, String> {
    text.parse().map_err(|_| "a byte is a number from 0 to 255".into())
}

/// Checks that a text is a number. The element type, which decides about its range, is known once the tensor is open.
pub(crate) fn number(text: &str) -> Result<String, String> {
    let number: Result<f64, _> = text.parse();
    number.map(|_| text.to_owned()).map_err(|_| "a number is required: 1, -1, 0.5".into())
}

/// Users whose processes this process shares memory with, beside its own user.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct AllowArguments {
    /// Also share memory with processes of this user, by name or uid; both sides have to allow each other. Can be repeated
    #[arg(long = "allow-user", value_name = "USER", value_parser = uid, global = true)]
    users: Vec<u32>,
}

impl AllowArguments {
    pub(crate) fn list(&self) -> AllowList {
        self.users.iter().fold(AllowList::own_user(), |list, uid| list.user(*uid))
    }
}

/// Parses a uid, or a user name of `/etc/passwd`.
fn uid(text: &str) -> Result<u32, String> {
    if let Ok(uid) = text.parse() {
        return Ok(uid);
    }
    let passwd = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    uid_of_name(&passwd, text).ok_or_else(|| {
        format!("/etc/passwd has no user of this name; use the number that 'id -u {text}' prints")
    })
}

/// Returns the third field of the line that begins with this name (passwd(5)).
fn uid_of_name(passwd: &str, name: &str) -> Option<u32> {
    let mut entries = passwd.lines().map(|line| line.split(':').collect::<Vec<_>>());
    entries.find(|fields| fields[0] == name)?.get(2)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn duration_requires_a_unit_and_is_bounded() {
        assert_eq!(duration("500ms"), Ok(Duration::from_millis(500)));
        assert_eq!(duration("1m 30s"), Ok(Duration::from_secs(90)));
        assert_eq!(duration("0s"), Ok(Duration::ZERO));
        for invalid in ["10", "", "s", "-1s", "10 parsecs"] {
            assert!(duration(invalid).unwrap_err().contains("10s"), "{invalid:?}");
        }
        assert!(duration("2years").unwrap_err().contains("365d"));
        assert!(positive_duration("0ms").unwrap_err().contains("greater than zero"));
        assert_eq!(shown(Duration::from_secs(60)).to_string(), "1m");
    }

    #[test]
    fn every_element_type_has_one_unambiguous_short_name() {
        let command = || clap::Command::new("t").arg(clap::Arg::new("dtype").value_parser(dtype()));
        let parse = |name: &str| {
            let matches = command().try_get_matches_from(["t", name]).map_err(|error| error.to_string())?;
            Ok::<_, String>(*matches.get_one::<Dtype>("dtype").unwrap())
        };
        for (alias, dtype) in [
            ("f32", Dtype::F32),
            ("bf16", Dtype::BF16),
            ("u8", Dtype::U8),
            ("i64", Dtype::I64),
            ("c64", Dtype::COMPLEX64),
        ] {
            assert_eq!(parse(alias), Ok(dtype));
        }
        for known in Dtype::ALL {
            assert_eq!(parse(known.name().unwrap()), Ok(*known));
        }
        for (name, alias) in DTYPE_ALIASES.iter() {
            assert_eq!(parse(alias), parse(name));
            assert!(Dtype::from_name(alias).is_none_or(|dtype| Ok(dtype) == parse(name)), "{alias}");
        }
        let error = parse("flaot32").unwrap_err();
        assert!(error.contains("float32"), "{error}");
    }

    #[test]
    fn user_is_a_number_or_a_name_of_passwd() {
        assert_eq!(uid("1000"), Ok(1000));
        assert_eq!(uid("root"), Ok(0));
        assert_eq!(uid_of_name("root:x:0:0::/:\nworker:x:1001:100::/:\n", "worker"), Some(1001));
        assert!(uid("no-such-user").unwrap_err().contains("id -u no-such-user"));
    }

    #[test]
    fn color_option_is_found_before_parsing() {
        let choice = |arguments: &[&str]| color_of_help(arguments.iter().map(OsStr::new));
        assert_eq!(choice(&["ps", "--color", "never"]), clap::ColorChoice::Never);
        assert_eq!(choice(&["--color=always", "ps"]), clap::ColorChoice::Always);
        assert_eq!(choice(&["ps", "--", "--color=always"]), clap::ColorChoice::Auto);
    }
}
