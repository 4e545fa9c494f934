//! Settings of the environment: the processes that may open exports, and the default kind of memory.

use device_ipc_core::backend::{HandleKind, Unavailable, environment};

use super::kind::{KEY, SHAREABLE};

/// The environment variable that disables the driver's list of importers: `off`, or `on`, the default.
pub const VALIDATION_VARIABLE: &str = "DEVICE_IPC_ASCEND_PID_VALIDATION";

/// The environment variable with the default kind of allocations: `key`, the default, or `shareable`.
pub const ALLOCATION_VARIABLE: &str = "DEVICE_IPC_ASCEND_ALLOCATE";

/// Whether the driver validates the process that opens a handle.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum PidValidation {
    /// The driver admits the processes that the exporter has listed (`aclrtIpcMemSetImportPid`): the broker lists each
    /// importer when it grants a lease. Other processes that read the key cannot open the memory.
    #[default]
    On,
    /// The driver admits every process of the machine that has the key
    /// (`ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION`), as with torch_npu. The broker still sends the key only to
    /// processes with the descriptor's token; but any process that reads the key, now or later, can open the memory for
    /// as long as it is exported. For drivers whose list does not work, and between containers whose process ids the
    /// driver does not distinguish.
    Off,
}

impl PidValidation {
    /// Returns the setting of the environment.
    pub(crate) fn from_environment() -> Result<Self, Unavailable> {
        Self::parse(&text_of(VALIDATION_VARIABLE))
    }

    fn parse(value: &str) -> Result<Self, Unavailable> {
        match value {
            "" | "on" => Ok(Self::On),
            "off" => Ok(Self::Off),
            other => Err(Unavailable::Failed {
                detail: format!("{VALIDATION_VARIABLE} is {other:?}; set it to \"on\" or \"off\""),
            }),
        }
    }
}

/// Returns the default kind of allocations according to the environment.
pub(crate) fn allocation_from_environment() -> Result<HandleKind, Unavailable> {
    parse_allocation(&text_of(ALLOCATION_VARIABLE))
}

fn parse_allocation(value: &str) -> Result<HandleKind, Unavailable> {
    match value {
        "" | "key" => Ok(KEY),
        "shareable" => Ok(SHAREABLE),
        other => Err(Unavailable::Failed {
            detail: format!("{ALLOCATION_VARIABLE} is {other:?}; set it to \"key\" or \"shareable\""),
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
    fn pid_validation_is_on_unless_set_to_off() {
        assert_eq!(PidValidation::parse("").unwrap(), PidValidation::On);
        assert_eq!(PidValidation::parse("on").unwrap(), PidValidation::On);
        assert_eq!(PidValidation::parse("off").unwrap(), PidValidation::Off);
        let error = PidValidation::parse("0").unwrap_err().to_string();
        assert!(error.contains(VALIDATION_VARIABLE) && error.contains("\"off\""), "{error}");
    }

    #[test]
    fn allocation_kind_is_key_unless_set_to_shareable() {
        assert_eq!(parse_allocation("").unwrap(), KEY);
        assert_eq!(parse_allocation("key").unwrap(), KEY);
        assert_eq!(parse_allocation("shareable").unwrap(), SHAREABLE);
        let error = parse_allocation("fd").unwrap_err().to_string();
        assert!(error.contains(ALLOCATION_VARIABLE) && error.contains("\"shareable\""), "{error}");
    }
}
