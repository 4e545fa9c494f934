//! The section of `device-ipc doctor`.

use device_ipc_core::backend::{Diagnosis, Finding, Machine};

use crate::backend::VISIBLE_VARIABLE;

#[derive(Debug)]
pub(crate) struct AcmeDiagnosis;

impl Diagnosis for AcmeDiagnosis {
    fn has_devices(&self, _machine: &Machine) -> bool {
        true
    }

    fn check_machine(&self, machine: &Machine, is_available: bool) -> Vec<Finding> {
        let check = "Acme shared memory";
        let found = match machine.variable(VISIBLE_VARIABLE) {
            Some(value) if value != "0" => {
                let found = format!("{VISIBLE_VARIABLE}={value:?} hides the only device");
                Finding::problem(check, found, format!("unset {VISIBLE_VARIABLE}"))
            }
            _ if is_available => Finding::ok(check, "visible to this process"),
            _ => Finding::problem(check, "not available", "see the reason above"),
        };
        vec![found]
    }
}
