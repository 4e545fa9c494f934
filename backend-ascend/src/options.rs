//! What is a choice: who may open what this process exports, and as what memory is allocated.

use device_ipc_core::{HandleKind, Unavailable, environment};

use crate::kinds::{KEY, SHAREABLE};

/// The environment variable that turns the driver's list of importers off: `off`, or `on`, the default.
pub const VALIDATION_VARIABLE: &str = "DEVICE_IPC_ASCEND_PID_VALIDATION";

/// The environment variable that says as what memory is allocated where nobody asks for a kind: `key`, the default, or
/// `shareable`.
pub const ALLOCATION_VARIABLE: &str = "DEVICE_IPC_ASCEND_ALLOCATE";

/// Does the driver check which process opens a handle?
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PidValidation {
    /// It admits the processes that the exporter has listed (`aclrtIpcMemSetImportPid`): the broker lists each
    /// importer when it gives it a lease. A key that was read by somebody else opens nothing.
    #[default]
    On,
    /// It admits every process of the machine that has the key
    /// (`ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION`), as torch_npu does. The broker still gives the key to
    /// nobody but those that show the descriptor's token; but whoever else gets to read it, now or later, can open
    /// the memory for as long as it is exported. For drivers whose list does not work, and between containers whose
    /// process ids the driver does not tell apart.
    Off,
}

impl PidValidation {
    /// As the environment says.
    pub(crate) fn from_environment() -> Result<Self, Unavailable> {
        Self::parse(&text_of(VALIDATION_VARIABLE))
    }

    fn parse(value: &str) -> Result<Self, Unavailable> {
        match value {
            "" | "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            other => Err(Unavailable::Failed {
                detail: format!("{VALIDATION_VARIABLE} is {other:?}: accepted is \"on\" or \"off\""),
            }),
        }
    }
}

/// The kind that memory is allocated for where nobody asks for one, as the environment says.
pub(crate) fn allocation_from_environment() -> Result<HandleKind, Unavailable> {
    parse_allocation(&text_of(ALLOCATION_VARIABLE))
}

fn parse_allocation(value: &str) -> Result<HandleKind, Unavailable> {
    match value {
        "" | "key" => Ok(KEY),
        "shareable" => Ok(SHAREABLE),
        other => Err(Unavailable::Failed {
            detail: format!("{ALLOCATION_VARIABLE} is {other:?}: accepted is \"key\" or \"shareable\""),
        }),
    }
}

fn text_of(variable: &str) -> String {
    environment::variable(variable).map(|value| value.to_string_lossy().into_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_used_unless_it_is_turned_off_in_so_many_words() {
        assert_eq!(PidValidation::parse("").unwrap(), PidValidation::On);
        assert_eq!(PidValidation::parse("on").unwrap(), PidValidation::On);
        assert_eq!(PidValidation::parse("off").unwrap(), PidValidation::Off);
        let error = PidValidation::parse("0").unwrap_err().to_string();
        assert!(error.contains(VALIDATION_VARIABLE) && error.contains("\"off\""), "{error}");
    }

    #[test]
    fn memory_is_allocated_for_keys_unless_something_else_is_said() {
        assert_eq!(parse_allocation("").unwrap(), KEY);
        assert_eq!(parse_allocation("key").unwrap(), KEY);
        assert_eq!(parse_allocation("shareable").unwrap(), SHAREABLE);
        let error = parse_allocation("fd").unwrap_err().to_string();
        assert!(error.contains(ALLOCATION_VARIABLE) && error.contains("\"shareable\""), "{error}");
    }
}
