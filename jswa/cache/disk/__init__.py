"""Files behind host memory: texts of the prefix cache that outlive host memory and the process."""
