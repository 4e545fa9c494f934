//! The extension module `device_ipc._native` with the backend acme.

use _native as _;
use acme as _;
