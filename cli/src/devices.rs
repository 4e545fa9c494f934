//! `device-ipc devices`: lists backends and devices.

use anyhow::{Result, bail};
use comfy_table::{Table, presets};
use device_ipc::backend::Backends;
use device_ipc::{DeviceInfo, Ipc};
use serde::Serialize;

use crate::output::line;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Show only this backend; its unavailability is an error
    #[arg(long, value_name = "NAME", value_parser = crate::arguments::backend())]
    backend: Option<String>,
}

#[derive(Serialize)]
struct Report {
    backends: Vec<BackendReport>,
}

#[derive(Serialize)]
struct BackendReport {
    name: &'static str,
    available: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    library: Option<String>,
    devices: Vec<DeviceReport>,
    /// Row `i`, column `j`: whether device `i` can access memory of device `j`.
    peer_access: Vec<Vec<bool>>,
}

#[derive(Serialize)]
struct DeviceReport {
    ordinal: u32,
    name: String,
    identity: String,
    memory_bytes: u64,
}

impl From<&DeviceInfo> for DeviceReport {
    fn from(device: &DeviceInfo) -> Self {
        Self {
            ordinal: device.ordinal.get(),
            name: device.name.clone(),
            identity: device.identity.to_string(),
            memory_bytes: device.memory_bytes,
        }
    }
}

pub(crate) fn run(arguments: &Arguments, json: bool) -> Result<()> {
    let only = arguments.backend.as_deref();
    let report = report(only)?;
    if json {
        line(serde_json::to_string_pretty(&report)?)?
    } else {
        print(&report)?
    }
    match report.backends.iter().find(|backend| only.is_some() && !backend.available) {
        Some(backend) => bail!("the backend {} is unavailable; the reason is printed above", backend.name),
        None => Ok(()),
    }
}

fn report(only: Option<&str>) -> Result<Report> {
    let mut backends = Vec::new();
    for status in Ipc::available() {
        if only.is_some_and(|only| only != status.name) {
            continue;
        }
        backends.push(match status.state {
            Ok(devices) => available(status.name, &devices)?,
            Err(reason) => BackendReport {
                name: status.name,
                available: false,
                why_not: Some(reason.to_string()),
                version: None,
                library: None,
                devices: Vec::new(),
                peer_access: Vec::new(),
            },
        });
    }
    Ok(Report { backends })
}

fn available(name: &'static str, devices: &[DeviceInfo]) -> Result<BackendReport> {
    let backend = Backends::registered().named(name)?;
    let info = backend.info();
    let mut peer_access = Vec::with_capacity(devices.len());
    for from in devices {
        let row: Result<Vec<_>, _> =
            devices.iter().map(|to| backend.peer_access(from.ordinal, to.ordinal)).collect();
        peer_access.push(row?);
    }
    Ok(BackendReport {
        name,
        available: true,
        why_not: None,
        version: Some(info.version.clone()),
        library: info.library.clone(),
        devices: devices.iter().map(DeviceReport::from).collect(),
        peer_access,
    })
}

fn print(report: &Report) -> Result<()> {
    for backend in &report.backends {
        let version = backend.version.as_deref().unwrap_or("not available");
        let library = backend.library.as_ref().map(|library| format!(", {library}")).unwrap_or_default();
        line(format_args!("{}: {version}{library}", backend.name))?;
        if let Some(reason) = &backend.why_not {
            line(format_args!("  {reason}"))?;
        }
        if !backend.devices.is_empty() {
            line(table(backend))?;
        }
        line("")?;
    }
    Ok(())
}

fn table(backend: &BackendReport) -> Table {
    let mut table = Table::new();
    table.load_style(presets::UTF8_FULL_CONDENSED);
    let mut header = vec!["device".to_owned(), "name".into(), "identity".into(), "memory (MiB)".into()];
    header.extend(backend.devices.iter().map(|device| format!("reaches {}", device.ordinal)));
    table.set_header(header);
    for (device, reaches) in backend.devices.iter().zip(&backend.peer_access) {
        let memory = device.memory_bytes / (1024 * 1024);
        let mut row = vec![
            device.ordinal.to_string(),
            device.name.clone(),
            device.identity.clone(),
            memory.to_string(),
        ];
        row.extend(reaches.iter().map(|yes| if *yes { "yes".to_owned() } else { "no".into() }));
        table.add_row(row);
    }
    table
}
