"""What does one program do? Each module has a kernel, and below it the launcher that names its arguments."""
