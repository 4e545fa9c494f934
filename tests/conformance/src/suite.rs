//! A backend's run of the suite.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::sync::Arc;

use device_ipc_core::backend::{DeviceIpc, Unavailable};

use crate::arguments::{Arguments, HELP};
use crate::case::{Case, MAIN_ROLE};
use crate::context::Context;
use crate::expected::ExpectedSkips;
use crate::outcome::{Outcome, Stop};
use crate::process::{Address, attach_to_starter};
use crate::runner::{PROBE, Plan, Runner};

type Make = Box<dyn Fn() -> Result<Arc<dyn DeviceIpc>, Unavailable>>;

/// All cases, over the variants of one backend. See the [crate documentation](crate).
#[must_use = "nothing runs before Suite::run"]
pub struct Suite {
    name: &'static str,
    variants: Vec<Variant>,
    cases: Vec<Case>,
    expected_skips: String,
}

struct Variant {
    name: &'static str,
    make: Make,
    cases: Cases,
    remedy: Option<&'static str>,
}

/// The cases of a variant.
enum Cases {
    All,
    OfThemes(&'static [&'static str]),
    One(&'static str),
}

impl Cases {
    fn has(&self, case: &str) -> bool {
        match self {
            Self::All => true,
            Self::OfThemes(themes) => case.split("::").next().is_some_and(|theme| themes.contains(&theme)),
            Self::One(name) => case == *name,
        }
    }
}

impl Suite {
    /// The suite for the backend of this name.
    pub fn new(name: &'static str) -> Self {
        Self { name, variants: Vec::new(), cases: crate::cases::all(), expected_skips: String::new() }
    }

    /// Adds a variant. `make` runs in every process of a case, never in the runner.
    pub fn variant(
        self,
        name: &'static str,
        make: impl Fn() -> Result<Arc<dyn DeviceIpc>, Unavailable> + 'static,
    ) -> Self {
        self.with(Variant { name, make: Box::new(make), cases: Cases::All, remedy: None })
    }

    /// Adds a variant that runs the cases of these themes only: a machine on which the others show nothing new.
    pub fn variant_of_themes(
        self,
        name: &'static str,
        themes: &'static [&'static str],
        make: impl Fn() -> Result<Arc<dyn DeviceIpc>, Unavailable> + 'static,
    ) -> Self {
        self.with(Variant { name, make: Box::new(make), cases: Cases::OfThemes(themes), remedy: None })
    }

    /// Adds a variant that makes a mistake: this case alone runs, and has to fail with this text.
    pub fn faulty_variant(
        self,
        name: &'static str,
        case: &'static str,
        remedy: &'static str,
        make: impl Fn() -> Result<Arc<dyn DeviceIpc>, Unavailable> + 'static,
    ) -> Self {
        self.with(Variant { name, make: Box::new(make), cases: Cases::One(case), remedy: Some(remedy) })
    }

    fn with(mut self, variant: Variant) -> Self {
        let is_new = self.variants.iter().all(|known| known.name != variant.name);
        assert!(is_new, "two variants are called {}", variant.name);
        self.variants.push(variant);
        self
    }

    /// Adds a case of one's own.
    pub fn case(mut self, case: Case) -> Self {
        self.cases.push(case);
        self
    }

    /// States which cases may be skipped, one line for each: `variant/theme::case: reason`.
    ///
    /// The variant `*` is every variant. The case `theme::*` is every case of the theme: some of them have to be skipped
    /// for this reason, where a line that names a case says that this one has to be. The reason is the skip's, or a part
    /// of it. `[one device]` or `[several devices]` in front restricts the line to such machines; `#` begins a comment.
    ///
    /// A run prints the lines for the skips that are not listed, ready to be pasted.
    pub fn expected_skips(mut self, text: &str) -> Self {
        self.expected_skips = text.to_owned();
        self
    }

    /// Runs what the command line asks for; or, in a process that the suite started, the case that it was started for.
    pub fn run(self) -> ExitCode {
        if let Some(address) = Address::of_this_process() {
            return self.run_here(&address);
        }
        let expected = match ExpectedSkips::parse(&self.expected_skips) {
            Ok(expected) => expected,
            Err(errors) => {
                eprintln!(
                    "error: the list of expected skips has lines that make no sense:\n{}",
                    errors.join("\n")
                );
                return ExitCode::FAILURE;
            }
        };
        let variants: Vec<_> = self.variants.iter().map(|variant| variant.name).collect();
        let arguments = Arguments::parse(std::env::args().skip(1))
            .and_then(|arguments| arguments.check_variant(&variants).map(|()| arguments));
        let arguments = match arguments {
            Ok(arguments) if arguments.help => {
                print!("{HELP}\nvariants of {}: {}\n", self.name, variants.join(" "));
                return ExitCode::SUCCESS;
            }
            Ok(arguments) => arguments,
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::FAILURE;
            }
        };
        let cases: Vec<_> = self.cases.iter().map(|case| case.name).collect();
        let plan = |variant: &Variant| Plan {
            variant: variant.name,
            cases: cases.iter().copied().filter(|case| variant.cases.has(case)).collect(),
            remedy: variant.remedy,
        };
        let plans = self.variants.iter().map(plan).collect();
        Runner { suite: self.name, plans, cases, expected, arguments }.run()
    }

    fn run_here(&self, address: &Address) -> ExitCode {
        let starter = match attach_to_starter() {
            Ok(starter) => starter,
            Err(error) => {
                eprintln!("error: {error}");
                return ExitCode::FAILURE;
            }
        };
        let Some(variant) = self.variants.iter().find(|variant| variant.name == address.variant) else {
            eprintln!("error: there is no variant {:?}", address.variant);
            return ExitCode::FAILURE;
        };
        let backend = match (variant.make)() {
            Ok(backend) => backend,
            Err(reason) => {
                eprintln!("the backend is unavailable: {reason}");
                // The runner may have given up; there is no other process to report to.
                let _ = starter.send(&format!("unavailable {reason}"));
                return ExitCode::FAILURE;
            }
        };
        let context = Context::new(address.clone(), backend, starter);
        let outcome = if address.case == PROBE {
            context.devices().and_then(|devices| context.send_line(&format!("devices {}", devices.len())))
        } else {
            self.outcome_of(address, &context)
        };
        report(&context, address, outcome)
    }

    fn outcome_of(&self, address: &Address, context: &Context) -> Outcome {
        let case = self.cases.iter().find(|case| case.name == address.case);
        let body = case.and_then(|case| case.body(&address.role));
        let Some(body) = body else {
            return Err(Stop::Failed(format!(
                "there is no role {:?} of a case {:?}",
                address.role, address.case
            )));
        };
        catch_unwind(AssertUnwindSafe(|| body(context)))
            .unwrap_or_else(|_| Err(Stop::Failed("it panicked; the message stands in its output".into())))
    }
}

impl std::fmt::Debug for Suite {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let variants: Vec<_> = self.variants.iter().map(|variant| variant.name).collect();
        f.debug_struct("Suite").field("name", &self.name).field("variants", &variants).finish_non_exhaustive()
    }
}

/// Tells the starter how it ended: the runner by a line, a case by the exit status of its peer.
fn report(context: &Context, address: &Address, outcome: Outcome) -> ExitCode {
    let (line, code) = match outcome {
        Ok(()) => ("passed".to_owned(), ExitCode::SUCCESS),
        Err(Stop::Skipped(reason)) => (format!("skipped {reason}"), ExitCode::SUCCESS),
        Err(Stop::Failed(what)) => (format!("failed {what}"), ExitCode::FAILURE),
    };
    if address.role == MAIN_ROLE {
        // A runner that has given up needs no answer.
        let _ = context.send_line(&line);
    } else if code != ExitCode::SUCCESS {
        eprintln!("the {} process {line}", address.role);
    }
    code
}
